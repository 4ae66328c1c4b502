"""Asks a service's standard gRPC health service whether it serves: `python -m streamrl.rpc.probe HOST:PORT`.

For health checks that run a command in a service's container. Kubernetes asks by gRPC itself.
"""

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streamrl.rpc.channel import open_channel

_DEADLINE_S = 3.0


def main(arguments_given: Sequence[str]) -> int:
    """Returns the exit code: 0 it serves, 1 it does not, with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m streamrl.rpc.probe", description="Asks whether a service serves.")
    parser.add_argument("address", metavar="HOST:PORT")
    address = parser.parse_args(arguments_given).address
    with open_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_DEADLINE_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{address} does not answer: {error.code().name}: {error.details()}\n")
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        sys.stderr.write(f"{address} is {state}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
