"""The container image: its build (build), and what the stages of docker/Dockerfile run (native, cuda, prune, info)."""
