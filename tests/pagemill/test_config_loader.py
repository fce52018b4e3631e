"""Settings: which source wins, and that nothing unknown or malformed passes silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from pagemill.commands.serve import load_all, serve_specs
from pagemill.commands.settings_options import build_options
from pagemill.config_loader import (
    OTHER_VARIABLES,
    SERVICES,
    LoadedSettings,
    environment_name,
    is_setting_variable,
    load_settings,
)
from pagemill.errors import ConfigError


def load(
    service: str, *, file: Path | None = None, env: dict[str, str] | None = None, options: dict[str, Any] | None = None
) -> LoadedSettings:
    return load_settings(service, config_file=str(file) if file else None, environment=env or {}, options=options or {})


def refusal(service: str = "router", **sources: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(service, **sources)
    assert "\n" not in caught.value.message
    return caught.value.message


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "pagemill.yaml"
    file.write_text(text)
    return file


def test_later_sources_win_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "common: {log_level: DEBUG, max_num_seqs: 1}\n"
        "scheduler: {port: 1, max_num_seqs: 2, max_queued_requests: 3, max_queued_tokens: 9}\n",
    )
    env = {"PAGEMILL_SCHEDULER_MAX_NUM_SEQS": "4", "PAGEMILL_SCHEDULER_MAX_QUEUED_REQUESTS": "5"}
    loaded = load("scheduler", file=file, env=env, options={"max_queued_requests": "6"})
    values = {name: (value, origin) for name, value, origin in loaded.rows()}
    assert values["host"] == ("127.0.0.1", "default")
    assert values["log_level"] == ("DEBUG", f"{file}: common.log_level")
    assert values["max_queued_tokens"] == (9, f"{file}: scheduler.max_queued_tokens")
    assert values["max_num_seqs"] == (4, "environment PAGEMILL_SCHEDULER_MAX_NUM_SEQS")
    assert values["max_queued_requests"] == (6, "command line --max-queued-requests")


def test_a_services_own_value_beats_a_common_one_whatever_their_order(tmp_path: Path) -> None:
    file = write(tmp_path, "scheduler: {log_level: ERROR}\ncommon: {log_level: DEBUG}\n")
    assert load("scheduler", file=file).settings.log_level == "ERROR"
    env = {"PAGEMILL_SCHEDULER_LOG_LEVEL": "WARNING", "PAGEMILL_LOG_LEVEL": "DEBUG"}
    assert load("scheduler", env=env).settings.log_level == "WARNING"
    assert load("router", env=env).settings.log_level == "DEBUG"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "router: {http_port: 81}\n")
    assert load("router", env={"PAGEMILL_CONFIG_FILE": str(file)}).settings.model_dump()["http_port"] == 81


def test_unknown_keys_of_a_file_are_refused_by_name_with_a_hint(tmp_path: Path) -> None:
    assert "router.http_prot, did you mean http_port?" in refusal(file=write(tmp_path, "router: {http_prot: 1}\n"))
    assert "unknown section 'routr', did you mean router?" in refusal(file=write(tmp_path, "routr: {}\n"))
    assert "unknown setting common.http_port" in refusal(file=write(tmp_path, "common: {http_port: 1}\n"))


def test_unknown_keys_in_sections_of_other_services_are_refused_too(tmp_path: Path) -> None:
    assert "worker.block_sise" in refusal("router", file=write(tmp_path, "worker: {block_sise: 8}\n"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- 1\n", "must hold sections"),
        ("router: 5\n", "section 'router' must be a map"),
        ("router: {http_port: 1, http_port: 2}\n", "comes twice"),
        ("router:\n  - a\n  b: [\n", "line 3: is not YAML"),
        ("router: {http_port: \x01}\n", "is not YAML"),
        ("router: 2020-13-45\n", "is not YAML"),
        ("[1]: 2\n", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        ("router: {http_port: !!python/object/apply:os.getcwd []}\n", "is not YAML"),
    ],
)
def test_a_malformed_file_is_one_clear_line(tmp_path: Path, text: str, complaint: str) -> None:
    message = refusal(file=write(tmp_path, text))
    assert complaint in message
    assert "pagemill.yaml" in message
    assert "unicode string" not in message
    assert "^" not in message


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("http_port: 1\n", "router.http_port"),
        ("redis: off\n", "serve.redis"),
        ("model: x\n", "common.model"),
        ("scheduler: {http_port: 1}\n", "router.http_port"),
    ],
)
def test_a_setting_in_the_wrong_place_is_told_its_own(tmp_path: Path, text: str, place: str) -> None:
    message = refusal(file=write(tmp_path, text))
    assert "did you mean" in message
    assert place in message


@pytest.mark.parametrize("text", ["alice=sekret,other", "[alice=sekret, other]", '["alice=sekret,other"]'])
def test_keys_may_be_written_as_text_or_as_a_list(tmp_path: Path, text: str) -> None:
    settings = load("router", file=write(tmp_path, f"router:\n  api_key: {text}\n")).settings.model_dump()
    assert settings["api_key"] == "alice=sekret,other"


@pytest.mark.parametrize("text", ["5", "{a: sekret}", "[sekret, 5]", "'a='", "[a=sekret, b=sekret]"])
def test_keys_of_another_form_are_refused_without_showing_them(tmp_path: Path, text: str) -> None:
    message = refusal(file=write(tmp_path, f"router: {{api_key: {text}}}\n"))
    assert "router.api_key" in message
    assert "sekret" not in message


@pytest.mark.parametrize("service", ["worker", "serve"])
def test_variables_of_the_kernels_are_judged_where_kernels_run(service: str) -> None:
    assert "PAGEMILL_CPU_ISA" in refusal(service, env={"PAGEMILL_CPU_ISA": "foo"})
    load("router", env={"PAGEMILL_CPU_ISA": "foo"})


def test_help_leaves_addresses_as_they_are_written() -> None:
    helps = [str(option.help) for option in build_options(serve_specs()) if isinstance(option, click.Option)]
    assert any(text.startswith("redis://") for text in helps)
    assert not any(text.startswith("Redis://") for text in helps)
    assert any(text.startswith("Port of") for text in helps)


def test_an_unreadable_or_empty_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(file=tmp_path / "absent.yaml")
    assert load("router", file=write(tmp_path, "# nothing\n")).is_default("http_port")
    assert load("router", file=write(tmp_path, "router:\n")).is_default("http_port")


def test_words_like_off_stay_words_in_yaml(tmp_path: Path) -> None:
    settings = load("serve", file=write(tmp_path, "serve: {redis: off, restart: false}\n")).settings.model_dump()
    assert (settings["redis"], settings["restart"]) == ("off", False)


def test_unknown_variables_are_refused_by_name_with_a_hint() -> None:
    assert "PAGEMILL_ROUTER_HTTP_PROT, did you mean PAGEMILL_ROUTER_HTTP_PORT?" in refusal(
        env={"PAGEMILL_ROUTER_HTTP_PROT": "1"}
    )
    assert "PAGEMILL_WORKER_HTTP_PORT" in refusal(env={"PAGEMILL_WORKER_HTTP_PORT": "1"})


def test_variables_that_are_no_settings_are_left_alone() -> None:
    load("router", env={name: "1" for name in OTHER_VARIABLES if name != "PAGEMILL_CONFIG_FILE"})
    load("router", env={"PATH": "/bin", "PAGEMILL_TEST_ANYTHING": "1"})


def test_service_links_of_kubernetes_are_no_settings() -> None:
    links = {
        "PAGEMILL_SCHEDULER_PORT": "tcp://10.0.0.7:50052",
        "PAGEMILL_SCHEDULER_SERVICE_HOST": "10.0.0.7",
        "PAGEMILL_SCHEDULER_SERVICE_PORT": "50052",
        "PAGEMILL_SCHEDULER_SERVICE_PORT_GRPC": "50052",
        "PAGEMILL_SCHEDULER_PORT_50052_TCP": "tcp://10.0.0.7:50052",
        "PAGEMILL_SCHEDULER_PORT_50052_TCP_ADDR": "10.0.0.7",
    }
    assert load("scheduler", env=links).is_default("port")


@pytest.mark.parametrize(
    ("service", "variable", "value", "complaint"),
    [
        ("router", "PAGEMILL_ROUTER_HTTP_PORT", "99999", "less than or equal to 65535"),
        ("router", "PAGEMILL_ROUTER_HTTP_PORT", "http", "valid integer"),
        ("router", "PAGEMILL_ROUTER_CACHE_TOKENS", "perhaps", "valid boolean"),
        ("router", "PAGEMILL_TRACE_SAMPLE_RATIO", "nan", "finite number"),
        ("router", "PAGEMILL_DRAIN_TIMEOUT_S", "inf", "finite number"),
        ("worker", "PAGEMILL_WORKER_DEVICE", "gpu", "'auto', 'cpu' or 'cuda'"),
        ("worker", "PAGEMILL_WORKER_BLOCK_SIZE", "12", "one of 8, 16, 32, 64"),
    ],
)
def test_a_bad_value_names_where_it_came_from(service: str, variable: str, value: str, complaint: str) -> None:
    message = refusal(service, env={variable: value})
    assert complaint in message
    assert variable in message
    assert value in message


def test_lists_and_unset_values_from_text() -> None:
    env = {"PAGEMILL_ROUTER_SCHEDULER": "a:1, b:2", "PAGEMILL_METRICS_PORT": "none"}
    settings = load("router", env=env, options={"served_model_name": ("x", "y,z")}).settings.model_dump()
    assert settings["scheduler"] == ["a:1", "b:2"]
    assert settings["metrics_port"] is None
    assert settings["served_model_name"] == ["x", "y", "z"]
    assert load("router", env={"PAGEMILL_ROUTER_SCHEDULER": '["c:3"]'}).settings.model_dump()["scheduler"] == ["c:3"]


def test_secrets_are_masked_where_they_are_printed_and_in_errors() -> None:
    env = {"PAGEMILL_ROUTER_API_KEY": "hunter2", "PAGEMILL_ROUTER_REDIS_URL": "redis://user:hunter2@host:6379/0"}
    loaded = load("router", env=env)
    assert "hunter2" not in repr(loaded.rows())
    assert loaded.settings.model_dump()["api_key"] == "hunter2"
    assert "********@host:6379/0" in repr(loaded.rows())


def test_every_setting_of_every_service_can_be_set_by_its_variable() -> None:
    for service, model in SERVICES.items():
        defaults = model().model_dump()
        for name, value in defaults.items():
            text = ",".join(value) if isinstance(value, list) else "" if value is None else str(value)
            loaded = load(service, env={environment_name(service, name): text})
            assert getattr(loaded.settings, name) == value
            assert loaded.origins[name] == f"environment {environment_name(service, name)}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": "64", "kv_cache_gib": "2"}, "num_blocks is 64 and kv_cache_gib is 2"),
        ({"device": "cpu", "gpu_memory_utilization": "0.5"}, "gpu_memory_utilization is 0.5 and device is cpu"),
        (
            {"max_model_len": "8192", "num_blocks": "100"},
            "max_model_len is 8192 and num_blocks is 100: with block_size 16 the KV cache holds 1600 tokens",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused_naming_both(options: dict[str, str], words: str) -> None:
    assert words in refusal("worker", options=options)


def test_options_that_only_do_nothing_together_are_taken() -> None:
    load("worker", options={"device": "cpu", "enforce_eager": "true", "kv_cache_dtype": "fp8", "dtype": "float32"})
    load("worker", options={"device": "cuda", "gpu_memory_utilization": "0.5", "num_blocks": "64"})


def test_only_settings_are_kept_from_the_processes_of_a_supervisor() -> None:
    assert is_setting_variable("PAGEMILL_ROUTER_HTTP_PORT")
    assert is_setting_variable("PAGEMILL_CONFIG_FILE")
    assert not is_setting_variable("PAGEMILL_DEMO_MODEL")
    assert not is_setting_variable("PATH")


def test_serve_gives_a_shared_option_to_all_services_and_an_own_one_to_its_service() -> None:
    loaded = load_all(None, {"max_num_seqs": "7", "http_port": "0", "port": "5", "log_level": "DEBUG"}, {})
    assert loaded["scheduler"].settings.model_dump()["max_num_seqs"] == 7
    assert loaded["worker"].settings.model_dump()["max_num_seqs"] == 7
    assert loaded["router"].settings.model_dump()["http_port"] == 0
    assert loaded["scheduler"].settings.model_dump()["port"] == 5
    assert {item.settings.log_level for item in loaded.values()} == {"DEBUG"}


def test_serve_has_one_option_for_every_setting_that_it_does_not_decide_itself() -> None:
    names = [spec.parameter for spec in serve_specs()]
    assert len(names) == len(set(names))
    assert set(names) == {name for model in SERVICES.values() for name in model.model_fields} - {"scheduler"}
