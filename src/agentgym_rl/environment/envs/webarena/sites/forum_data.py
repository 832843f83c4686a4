"""Data of the forum: communities, members, posts, comments. Generated from a fixed seed."""

from __future__ import annotations

import random
import sqlite3

from agentgym_rl.environment.envs.webarena.sites.people import day, username

ME = "quiet_harbour"
"""Member name of the agent."""

SCHEMA = """
CREATE TABLE community(id INTEGER PRIMARY KEY, slug TEXT, title TEXT, description TEXT, subscribed INT);
CREATE TABLE member(name TEXT PRIMARY KEY, bio TEXT, since TEXT);
CREATE TABLE post(id INTEGER PRIMARY KEY, community_id INT, author TEXT, title TEXT, body TEXT, day TEXT, score INT,
    my_vote INT);
CREATE TABLE comment(id INTEGER PRIMARY KEY, post_id INT, author TEXT, body TEXT, day TEXT, score INT, my_vote INT);
"""

COMMUNITIES = {
    "gardening": ("Gardening", "Soil, seeds and patience."),
    "cycling": ("Cycling", "Routes, repairs and rain."),
    "bookclub": ("Book club", "One book a month, many opinions."),
    "homebrew": ("Home coffee", "Grinders, kettles and strong views."),
    "trains": ("Trains", "Timetables, old lines, new lines."),
    "astronomy": ("Astronomy", "Looking up after dark."),
}
POSTS: dict[str, tuple[tuple[str, str], ...]] = {
    "gardening": (
        ("When do you sow tomatoes indoors?", "Last year I started in February and they grew thin. Is March better?"),
        ("Slugs ate all my lettuce", "Every single one, overnight. What works that is not poison?"),
        ("My compost heap reached 62 degrees", "Grass, cardboard and coffee grounds, turned every four days."),
        ("Shade-loving plants for a north wall", "It gets an hour of sun at most. Ferns are an obvious choice."),
        (
            "Raised beds from old doors",
            "Four doors, sixteen screws, one afternoon. Photos when it has stopped raining.",
        ),
        ("How deep should garlic go?", "The packet says 5 cm, my neighbour says 10 cm."),
    ),
    "cycling": (
        ("Best winter tyres for a commuter bike", "Ice on the river path every morning. Studded or just wide?"),
        ("Rode to Greyhaven and back, 94 km", "Headwind both ways, which should not be possible."),
        ("Chain skips under load", "New chain, old cassette. Do I have to change both?"),
        ("A quiet route along the canal", "No cars for 17 km and two bakeries on the way."),
        ("Which pump fits Dunlop valves?", "The one I have only does Schrader and Presta."),
        ("Lights that survive heavy rain", "Mine drowned again. What do you use?"),
    ),
    "bookclub": (
        ("April pick: The Salt Ledger", "We meet on the 12th. Read to the end of part two."),
        ("A novel told backwards that works", "Most of them are a trick. This one is not."),
        ("Short books for a long train ride", "Under 200 pages, please, and not sad."),
        ("Did anyone finish the March book?", "I stopped at page 80 and feel no guilt."),
        ("Favourite unreliable narrator", "Mine is the lighthouse keeper in Tidewrack."),
        ("Translations compared: The Glass Orchard", "The older one is stiff but far closer to the text."),
    ),
    "homebrew": (
        ("Hand grinder under 100", "It only has to do pour-over. Two cups in the morning."),
        (
            "Water hardness changed my coffee more than beans",
            "Half tap water, half filtered: suddenly it tastes of fruit.",
        ),
        ("Is a gooseneck kettle worth it?", "I pour from a saucepan and spill a third."),
        ("Cold brew ratio that is not syrup", "One to twelve, sixteen hours, in the fridge."),
        ("Cleaning a moka pot", "Soap or no soap? My grandmother would faint."),
        ("Decaf that tastes of something", "Asking for my evenings."),
    ),
    "trains": (
        ("New timetable between Norvale and Eastmere", "Hourly at last, with a gap at noon nobody can explain."),
        ("The old harbour branch line", "Closed in 1967, the bridge still stands. Walk it while you can."),
        ("Night train with a bicycle", "You have to book the space by telephone. Yes, telephone."),
        ("Model railway exhibition in Calder Bay", "Twenty-two layouts and one live steam engine."),
        ("Why do platforms have different heights?", "Three builders, three opinions, one century."),
        ("Delay statistics for February", "83 per cent on time, up from 79 in January."),
    ),
    "astronomy": (
        ("First light with a 150 mm reflector", "Saturn on the first night. I shouted and woke the dog."),
        ("Dark sites within an hour of town", "The hill behind Stonebridge is the best I know."),
        ("Moon filter: yes or no?", "The full moon is like a lamp in the eye."),
        ("Binoculars before telescope", "Buy 10x50 and a chair. Telescope next year."),
        ("Meteor count on Friday", "Forty-one in two hours, lying on a picnic rug."),
        ("Fogged mirror at minus five", "A hair dryer on a long cable is not elegant but works."),
    ),
}
COMMENTS = (
    "I had the same trouble and gave up after a year.",
    "Thanks, this is the answer I was looking for.",
    "Depends on the weather where you are.",
    "My advice: start small and keep notes.",
    "This is wrong, but it is wrong in an interesting way.",
    "Agreed. It took me three tries.",
    "Could you post a picture?",
    "I would not do it that way again.",
    "Works for me since 2019.",
    "Ask at the library, they lend the tools.",
    "Twice the price is not twice as good.",
    "That made my morning.",
)
BIOS = ("Retired teacher.", "I fix things badly.", "Mostly reading.", "Two cats, one allotment.", "Here for the maps.")


def fill(db: sqlite3.Connection) -> None:
    rng = random.Random(23)
    authors = [username(number) for number in range(200, 224)]
    members = [(name, rng.choice(BIOS), day(rng, "2020-01-01", "2025-06-01")) for name in authors]
    db.executemany("INSERT INTO member VALUES (?, ?, ?)", [*members, (ME, "New around here.", "2025-11-02")])
    scores = rng.sample(range(3, 480), 36)  # all different, so that "the best" is unique
    days = sorted({day(rng, "2025-09-01", "2026-03-15") for _ in range(90)})
    dated = rng.sample(days, 36)
    number = 0
    for community_id, (slug, (title, description)) in enumerate(COMMUNITIES.items(), 1):
        subscribed = int(slug in ("gardening", "trains"))
        db.execute("INSERT INTO community VALUES (?, ?, ?, ?, ?)", (community_id, slug, title, description, subscribed))
        for heading, body in POSTS[slug]:
            number += 1
            db.execute(
                "INSERT INTO post VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
                (
                    number,
                    community_id,
                    rng.choice(authors),
                    heading,
                    body,
                    dated[number - 1],
                    scores[number - 1],
                ),
            )
            texts = rng.sample(COMMENTS, rng.randint(2, 5))
            points = rng.sample(range(-6, 60), len(texts))
            for text, score in zip(texts, points, strict=True):
                db.execute(
                    "INSERT INTO comment(post_id, author, body, day, score, my_vote) VALUES (?, ?, ?, ?, ?, 0)",
                    (number, rng.choice(authors), text, "2026-03-15", score),
                )
