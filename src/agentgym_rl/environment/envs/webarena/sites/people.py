"""Invented people in the sites' data."""

from __future__ import annotations

import random
from datetime import date, timedelta

FIRST = [
    "Amara",
    "Bruno",
    "Carla",
    "Dmitri",
    "Elif",
    "Farah",
    "Goran",
    "Hanna",
    "Idris",
    "Jonas",
    "Kaia",
    "Lars",
    "Mirela",
    "Nadia",
    "Oskar",
    "Priya",
    "Quentin",
    "Rosa",
    "Selim",
    "Tomas",
    "Una",
    "Viktor",
    "Wanda",
    "Xenia",
    "Yusuf",
    "Zora",
    "Anton",
    "Beatriz",
    "Cyril",
    "Delia",
]
LAST = [
    "Abbot",
    "Brandt",
    "Castell",
    "Doyle",
    "Eklund",
    "Ferrante",
    "Grover",
    "Halloran",
    "Ivers",
    "Janssen",
    "Kovac",
    "Lindholm",
    "Marchetti",
    "Novak",
    "Okafor",
    "Petrov",
    "Quist",
    "Rasmussen",
    "Salgado",
    "Tanaka",
    "Ulrich",
    "Vance",
    "Weller",
    "Xanthos",
    "Yilmaz",
    "Zeller",
    "Ashworth",
    "Bellamy",
    "Corrigan",
    "Duarte",
]


def full_name(index: int) -> str:
    """Return the name of a person. The first 900 names are distinct."""
    return f"{FIRST[index % 30]} {LAST[(index * 7 + index // 30) % 30]}"


def username(index: int) -> str:
    first, last = full_name(index).split()
    return f"{first.lower()}.{last.lower()}"


def day(rng: random.Random, first: str, last: str) -> str:
    """Return a random day between two, both included."""
    start, end = date.fromisoformat(first), date.fromisoformat(last)
    return (start + timedelta(days=rng.randint(0, (end - start).days))).isoformat()
