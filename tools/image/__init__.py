"""The container image. `build` makes it; the stages of docker/Dockerfile run `native`, `cuda`, `prune` and `info`."""
