"""The built-in corpus: short passages about states, cities, currencies, languages and continents.

Facts that a question combines are in different passages: a city's location, a state's capital and borders, its economy
and its people each have their own.
"""

from __future__ import annotations

import json
import unicodedata
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentgym_rl.environment.envs.searchqa.passages import Passage

_WITH_ARTICLE = frozenset(
    {
        "Bahamas",
        "Central African Republic",
        "Comoros",
        "Democratic Republic of the Congo",
        "Dominican Republic",
        "Gambia",
        "Maldives",
        "Marshall Islands",
        "Netherlands",
        "Philippines",
        "Republic of the Congo",
        "Solomon Islands",
        "United Arab Emirates",
        "United Kingdom",
        "United States",
    }
)
_ALIASES = {
    "Cabo Verde": ("Cape Verde",),
    "Czechia": ("Czech Republic",),
    "Democratic Republic of the Congo": ("DR Congo", "Congo-Kinshasa"),
    "Eswatini": ("Swaziland",),
    "Ivory Coast": ("Côte d'Ivoire", "Cote d'Ivoire"),
    "Myanmar": ("Burma",),
    "Republic of the Congo": ("Congo-Brazzaville",),
    "Timor Leste": ("East Timor",),
    "Turkey": ("Türkiye", "Turkiye"),
    "United Arab Emirates": ("UAE",),
    "United Kingdom": ("UK", "Great Britain"),
    "United States": ("United States of America", "USA", "US"),
}


LANGUAGE_ALIASES = {"Bangla": ("Bengali",), "Divehi": ("Dhivehi", "Maldivian"), "Persian": ("Farsi",)}


@dataclass(frozen=True, slots=True)
class Country:
    """A state. Empty or None values are uncertain and never asked for."""

    code: str
    name: str
    area: int
    """Square kilometres."""
    population: int
    continent: str = ""
    capital: tuple[str, ...] = ()
    """Names of the capital, the usual one first."""
    currency: tuple[str, str] | None = None
    """Name and ISO code."""
    domain: str = ""
    calling: str = ""
    language: str = ""
    """The only official language."""
    borders: tuple[str, ...] | None = None
    """Names of the states it has a land border with."""

    @property
    def called(self) -> str:
        """Return the name as used in a sentence: the Bahamas."""
        return f"the {self.name}" if self.name in _WITH_ARTICLE else self.name

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *_ALIASES.get(self.name, ())

    @property
    def economy_title(self) -> str:
        return f"Economy of {self.called}"

    @property
    def people_title(self) -> str:
        return f"Demographics of {self.called}"


@dataclass(frozen=True, slots=True)
class City:
    """A city or a large district of one."""

    name: str
    country: str
    population: int
    place: tuple[float, float]
    """Latitude and longitude."""
    zone: str
    """Name in the tz database."""
    state: str = ""
    """State of a city in the United States."""
    capital: bool = False
    unique: bool = False
    """Whether no other place of 15,000 people has this name."""

    @property
    def title(self) -> str:
        return self.name if self.unique else f"{self.name} ({self.state or self.country})"


@dataclass(frozen=True, slots=True)
class Geography:
    countries: dict[str, Country]
    """Countries by name, ordered by ISO code."""
    cities: tuple[City, ...]
    """Cities, largest first."""
    capitals: dict[str, City]
    """Capitals by the name of the country."""


@cache
def load_geography() -> Geography:
    raw = json.loads(Path(__file__).with_name("geography.json").read_text(encoding="utf-8"))
    countries = {}
    for row in raw["countries"]:
        lists = {key: tuple(row[key]) for key in ("capital", "currency", "borders") if key in row}
        countries[row["name"]] = Country(**{**row, **lists})
    cities = tuple(City(**{**row, "place": tuple(row["place"])}) for row in raw["cities"])
    return Geography(countries, cities, {city.country: city for city in cities if city.capital})


def without_accents(text: str) -> str:
    """Return the text without accents: Bogota is also accepted for Bogotá."""
    folded = "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return folded.replace("’", "'").replace("‘", "'")


def spellings(*names: str) -> tuple[str, ...]:
    """Return the names and their forms without accents, each once."""
    return tuple(dict.fromkeys([*names, *map(without_accents, names)]))


@cache
def corpus() -> tuple[Passage, ...]:
    geography = load_geography()
    entries: list[tuple[str, str]] = []
    for country in geography.countries.values():
        entries += _country_entries(country, geography)
    entries += [(city.title, _city_text(city, geography.countries[city.country])) for city in geography.cities]
    entries += _group_entries(geography)
    return tuple(Passage(str(number), title, text) for number, (title, text) in enumerate(entries))


def _country_entries(country: Country, geography: Geography) -> list[tuple[str, str]]:
    called = country.called
    start = called[0].upper() + called[1:]
    area = f" in {country.continent}" if country.continent else ""
    about = [f"{start} is a country{area} with an area of {country.area:,} square kilometres."]
    if country.capital:
        about.append(f"Its capital is {country.capital[0]}.")
    if country.borders is not None:
        neighbours = [geography.countries[name].called for name in country.borders]
        about.append(f"It has land borders with {_join(neighbours)}." if neighbours else "It has no land borders.")
    money = []
    if country.currency:
        money.append(f"The currency of {called} is the {country.currency[0]} ({country.currency[1]}).")
    if country.domain:
        money.append(f"Its internet top-level domain is {country.domain}.")
    if country.calling:
        money.append(f"The international calling code is {country.calling}.")
    people = [f"{start} has a population of {country.population:,} people."]
    if country.language:
        people.append(f"The official language is {country.language}.")
    return [
        (country.name, " ".join(about)),
        *([(country.economy_title, " ".join(money))] if money else []),
        (country.people_title, " ".join(people)),
    ]


def _city_text(city: City, country: Country) -> str:
    # The country's passage says which city is the capital. Here it would turn a two-hop question into one hop.
    area = f"{city.state}, {country.called}" if city.state else country.called
    latitude, longitude = city.place
    position = (
        f"{abs(latitude):.2f}° {'N' if latitude >= 0 else 'S'}, {abs(longitude):.2f}° {'E' if longitude >= 0 else 'W'}"
    )
    return (
        f"{city.name} is a city in {area}. It has {city.population:,} inhabitants, lies at {position}, and keeps the "
        f"time of the zone {city.zone}."
    )


def _group_entries(geography: Geography) -> list[tuple[str, str]]:
    """Return the passages about currencies, languages and continents."""
    currencies, languages, continents = defaultdict(list), defaultdict(list), defaultdict(list)
    for country in geography.countries.values():
        if country.currency:
            currencies[country.currency].append(country.called)
        if country.language:
            languages[country.language].append(country.called)
        if country.continent:
            continents[country.continent].append(country.called)
    return [
        *((f"{name} ({code})", f"The {name} is money in {_join(c)}.") for (name, code), c in currencies.items()),
        *((f"{name} language", f"{name} is the official language in {_join(c)}.") for name, c in languages.items()),
        *((name, f"Countries of {name} are {_join(c)}.") for name, c in continents.items()),
    ]


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
