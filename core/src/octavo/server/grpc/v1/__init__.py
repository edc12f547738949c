"""Version 1 of the gRPC API: octavo.proto and what is generated from it."""
