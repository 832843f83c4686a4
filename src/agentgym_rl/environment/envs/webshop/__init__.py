"""A shop with a catalogue of this project: find a product that fits a description, choose options, buy it."""

from agentgym_rl.environment.envs.webshop.env import WebShop

__all__ = ["WebShop"]
