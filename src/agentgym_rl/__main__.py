"""`python -m agentgym_rl` is the command `agentgym-rl`."""

from agentgym_rl.cli import main

main()
