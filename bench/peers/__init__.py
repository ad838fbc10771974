"""The engines that Headrace is measured against, each in an environment of its own: `make bench-peers`."""
