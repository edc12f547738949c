"""Servers in processes of their own."""

from server_processes import read_metric, roomy_server, scripted_server, tiny_model, tiny_server

__all__ = ["read_metric", "roomy_server", "scripted_server", "tiny_model", "tiny_server"]
