"""This folder goes on a server's PYTHONPATH: it holds nothing but packages with a name of their own."""
