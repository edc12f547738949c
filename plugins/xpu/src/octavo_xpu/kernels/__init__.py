"""Sources: `host.cpp` is compiled by the host's compiler, the others for the device when they are first needed."""
