"""Instances of a far site that load nothing: each fetches every version that its weights_svc announces, as an instance
does, and acknowledges it. `python -m benchmarks.peers.far_receivers HOST:PORT RUN NUM_RECEIVERS NUM_VERSIONS`

Writes, for each version, the Unix time at which the last of them had it.
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from generator_svc.weight_fetcher import WeightFetch, WeightSource
from streamrl.rpc.channel import open_channel
from streamrl.v1.weights_pb2 import TRANSFER_FORMAT_FULL, AcknowledgeRequest, NegotiateRequest, NegotiateResponse
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub


def main(address: str, run_id: str, num_receivers: int, num_versions: int) -> None:
    names = [f"generator-{index}" for index in range(num_receivers)]
    with open_channel(address) as channel, ThreadPoolExecutor(num_receivers) as threads:
        grpc.channel_ready_future(channel).result(60)
        stub = WeightsServiceStub(channel)
        for version in range(num_versions):
            list(threads.map(lambda name, version=version: _receive(stub, address, run_id, name, version), names))
            sys.stdout.write(f"{time.time()}\n")
            sys.stdout.flush()


def _receive(stub: WeightsServiceStub, address: str, run_id: str, name: str, version: int) -> None:
    manifest = _negotiate(stub, run_id, name, version).manifest
    WeightFetch(WeightSource(address, run_id, attempt=1, receiver=name, site="far"), manifest).run().buffer.close()
    stub.Acknowledge(
        AcknowledgeRequest(
            run_id=run_id, attempt=1, receiver=name, weight_version=version, digest=manifest.digest, fetch_s=0.0
        ),
        timeout=20,
    )


def _negotiate(stub: WeightsServiceStub, run_id: str, name: str, version: int) -> NegotiateResponse:
    request = NegotiateRequest(
        run_id=run_id,
        attempt=1,
        receiver=name,
        site="far",
        formats=[TRANSFER_FORMAT_FULL],
        min_weight_version=version,
        with_files=True,
    )
    while True:
        try:
            return stub.Negotiate(request, timeout=20)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
