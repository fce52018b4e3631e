"""Talk to a running Pagemill over gRPC: with the typed client, and with the generated stubs alone.

Start `pagemill serve`, then: python examples/grpc_client.py
"""

import os

import grpc

from pagemill.client import Client
from pagemill.sampling_params import SamplingParams
from pagemill.v1 import common_pb2, inference_pb2, inference_pb2_grpc

ADDRESS = os.environ.get("PAGEMILL_GRPC", "127.0.0.1:50051")
API_KEY = os.environ.get("PAGEMILL_API_KEY", "")


def with_the_typed_client() -> None:
    """Records in, records out; leaving the loop early would abort the request."""
    with Client(ADDRESS, api_key=API_KEY) as client:
        output = client.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16))
        print(f"completion: {output.outputs[0].text!r}")
        print("chat: ", end="")
        for delta in client.chat_stream([{"role": "user", "content": "Name three colours."}]):
            print("".join(sequence.text for sequence in delta.outputs), end="", flush=True)
        print()


def with_the_stubs() -> None:
    """What any language with gRPC can do."""
    metadata = [("authorization", f"Bearer {API_KEY}")] if API_KEY else None
    with grpc.insecure_channel(ADDRESS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            text="Water boils at", sampling=common_pb2.SamplingParams(temperature=0, max_tokens=16)
        )
        for response in stub.Generate(request, timeout=60, metadata=metadata):
            for delta in response.deltas:
                print(delta.text, end="", flush=True)
            if response.HasField("usage"):
                print(f"\nusage: {response.usage.prompt_tokens} in, {response.usage.completion_tokens} out")


if __name__ == "__main__":
    with_the_typed_client()
    with_the_stubs()
