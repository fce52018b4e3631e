"""Who is calling: API keys, and the tenant that each of them stands for."""

from __future__ import annotations

import hashlib
import hmac

from pagemill.errors import ConfigError, UnauthenticatedError

_BEARER = "bearer "


class ApiKeys:
    """Turns an `Authorization` value into a tenant.

    Args:
        setting: empty (any key is accepted), one key, or `tenant=key,tenant=key`. A key without a name is a tenant of
            its own.

    Tenants share neither KV blocks nor cached responses. Where any key is accepted, all callers are one tenant: a key
    that nobody checks isolates nobody.
    """

    def __init__(self, setting: str) -> None:
        self._tenants: list[tuple[bytes, str]] = []
        for entry in filter(None, (part.strip() for part in setting.split(","))):
            tenant, _, key = entry.rpartition("=")
            if not key:
                raise ConfigError("api_key: an entry has a name but no key", field="api_key")
            name = tenant or "key-" + hashlib.sha256(key.encode()).hexdigest()[:12]
            self._tenants.append((hashlib.sha256(key.encode()).digest(), name))
        keys = [digest for digest, _ in self._tenants]
        if len(set(keys)) != len(keys):
            raise ConfigError("api_key: two tenants have the same key", field="api_key")

    def __bool__(self) -> bool:
        """Keys are checked."""
        return bool(self._tenants)

    def tenant(self, authorization: str) -> str:
        """Tenant of an `Authorization` header or metadata value; "" where any key is accepted.

        Raises:
            UnauthenticatedError: the key is missing or wrong; the message repeats nothing of what was sent.
        """
        if not self._tenants:
            return ""
        if authorization[: len(_BEARER)].lower() != _BEARER:
            raise UnauthenticatedError("an API key is needed: send it as `Authorization: Bearer KEY`")
        digest = hashlib.sha256(authorization[len(_BEARER) :].strip().encode()).digest()
        found = ""
        # All digests are compared, so that the time tells nothing about which one came close.
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if not found:
            raise UnauthenticatedError("the API key is wrong")
        return found
