"""The capture: what a server writes for a request, and how it is checked."""
