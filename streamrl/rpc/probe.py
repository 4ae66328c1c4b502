"""Asks a service whether it serves, by gRPC's standard health: `python -m streamrl.rpc.probe HOST:PORT [--trust DIR]`.

For health checks that run a command in a service's container. Kubernetes asks by gRPC itself.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from streamrl.rpc.channel import open_channel
from streamrl.rpc.trust import ROLES, use_identity

_DEADLINE_S = 3.0


def main(arguments_given: Sequence[str]) -> int:
    """Returns the exit code: 0 it serves, 1 it does not, with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="python -m streamrl.rpc.probe", description="Asks whether a service serves.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--trust", type=Path, metavar="DIR", help="the service's rpc.trust (left out: plaintext)")
    parser.add_argument("--role", choices=ROLES, default="command", help="whose files to use (default: %(default)s)")
    arguments = parser.parse_args(arguments_given)
    address = arguments.address
    use_identity(arguments.trust, arguments.role)
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
