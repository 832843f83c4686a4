"""Agents written with other SDKs: an OpenAI-compatible endpoint over an engine that records every call's tokens."""
