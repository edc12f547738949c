"""gRPC beside HTTP: the same `Service` behind the API of `v1/octavo.proto`. Needs the extra `octavo[grpc]`.

`v1/*_pb2*` are generated: `python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=.
octavo/server/grpc/v1/octavo.proto` in `core/src`, with grpcio-tools 1.78, whose output newer protobufs load too.
"""
