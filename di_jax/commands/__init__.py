"""The commands of the command line: `run(config, args) -> exit code` in a module of the command's name."""
