"""The built-in SQL tasks: databases, questions, restrictions of statements, comparison of results."""

from __future__ import annotations

import hashlib
import re

import pytest

from agentgym_rl.environment.envs import text_svg
from agentgym_rl.environment.envs.sqlgym import SqlGym, tasks
from agentgym_rl.environment.envs.sqlgym.databases import build
from agentgym_rl.environment.envs.sqlgym.env import MAX_ROWS
from agentgym_rl.errors import EnvError

ALL_ITEMS = [item for split in SqlGym.splits.values() for item in split]


def item_with(words: str, split: str = "test") -> int:
    return next(item for item in SqlGym.splits[split] if words in tasks.question(item).text)


def started(item: int) -> SqlGym:
    env = SqlGym()
    env.reset(item)
    return env


def test_questions_and_rows_are_the_same_on_every_machine() -> None:
    env, parts = SqlGym(), []
    for item in ALL_ITEMS[::41]:
        parts += [env.reset(item), env.step(env.oracle()).observation]
    assert hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] == "2cca79292cb6eedb"


def test_the_oracle_answers_items_of_every_kind_in_two_turns() -> None:
    env = SqlGym()
    for item in ALL_ITEMS[::23]:
        env.reset(item)
        assert env.step(env.oracle()).info == {"valid": True}
        assert env.oracle() == "submit"
        step = env.step("submit")
        assert (step.reward, step.done, step.info) == (1.0, True, {"valid": True, "success": True})


def test_an_order_that_the_question_asks_for_is_unique() -> None:
    ordered = [question for item in ALL_ITEMS[3500:] if (question := tasks.question(item)).ordered]
    assert len(ordered) > 100
    for question in ordered:
        connection = build(question.database, question.seed)
        rows, other = (connection.execute(question.statement + tail).fetchall() for tail in ("", " DESC"))
        assert rows == other, question.text
        connection.close()


def test_new_forms_of_questions_are_not_in_training() -> None:
    def forms(items) -> set[str]:
        return {tasks.question(item).form for item in items}

    new = [item for item in SqlGym.splits["test"] if "new" in SqlGym.subsets_of(item)]
    old = [item for item in SqlGym.splits["test"] if "new" not in SqlGym.subsets_of(item)]
    assert 100 < len(new) < 200
    trained = forms(SqlGym.splits["train"][:600])
    assert not forms(new) & trained
    assert forms(old) <= trained


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("DELETE FROM station", "not authorized"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("ATTACH 'other.db' AS other", "not authorized"),
        ("SELECT load_extension('x')", "not authorized"),
        ("SELECT random()", "random"),
        ("SELECT datetime('now')", "datetime"),
        ("SELECT current_timestamp", "current_timestamp"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT * FROM book", "no such table"),
        ("WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT COUNT(*) FROM t", "too long"),
        ("SELECT replace(replace(replace('aaaaaaaaaa', 'a', 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'), 'a', "
         "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'), 'a', 'aaaaaaaaaaaaaaaaaaaaaaaaaa')", "too big"),
        ("-- nothing", "SELECT or WITH"),
        ("\x00", "failed"),
    ],
)  # fmt: skip
def test_statements_that_may_not_run_are_refused(statement: str, reason: str) -> None:
    env = started(item_with("highest fare"))
    before = env.state_key()
    step = env.step(statement)
    assert reason in step.observation
    assert (step.info, step.reward, step.done) == ({"valid": False}, 0.0, False)
    assert env.state_key() == before


def test_rows_are_shown_with_their_number() -> None:
    env = started(item_with("highest fare"))
    assert (
        env.step("SELECT 1 AS one, NULL AS none, 2.50 AS half").observation
        == "one | none | half\n1 | NULL | 2.5\n(1 row)"
    )
    assert env.step("SELECT 1 WHERE 0").observation == "1\n(no rows)"
    many = env.step("SELECT number FROM train").observation
    assert many.endswith("(36 rows; the first 10 are shown)")
    assert len(many.splitlines()) == 12
    assert f"over {MAX_ROWS} rows" in env.step("SELECT a.id FROM train a, train b").observation


def test_the_order_of_rows_matters_only_if_the_question_says_so() -> None:
    for item, wins in ((item_with("in this order", "train"), False), (item_with("Which titles did", "train"), True)):
        question = tasks.question(item)
        statement = question.statement.partition(" ORDER BY")[0]
        outcomes = []
        for order in ("1", "1 DESC"):
            env = started(item)
            assert len(env.step(f"SELECT * FROM ({statement}) ORDER BY {order}").observation.splitlines()) > 3
            outcomes.append(env.step("submit").info["success"])
        assert all(outcomes) is wins


def test_a_result_with_other_columns_or_repeated_rows_is_wrong() -> None:
    item = item_with("highest fare")
    for statement in ("SELECT 1", "SELECT fare, fare FROM train", "SELECT -1"):
        env = started(item)
        env.step(statement)
        step = env.step("Submit.")
        assert (step.reward, step.done, step.info["success"]) == (0.0, True, False)


def test_nothing_can_be_submitted_before_a_statement_worked() -> None:
    env = started(4000)
    env.step("SELEKT")
    step = env.step("submit")
    assert (step.done, step.info) == (False, {"valid": False})
    assert "submit" not in env.actions()


def test_a_fenced_statement_runs() -> None:
    env = started(4000)
    assert env.step("```sql\nSELECT 1\n```").info == {"valid": True}


def test_a_closed_environment_needs_a_reset() -> None:
    env = started(4000)
    env.close()
    with pytest.raises(EnvError, match="call reset first"):
        env.step("SELECT 1")


@pytest.mark.parametrize("headline", ["Which of the trains " * 10, "x" * 200])
def test_a_long_headline_leaves_space_for_the_status(headline: str) -> None:
    drawn = text_svg.draw("SQL", headline, "turn 1", "playing", [])
    heading = re.findall(r'font-size="19"[^>]*>([^<]*)</text>', drawn)[0]
    assert heading.endswith(" …")
    assert 40 < len(heading) <= 60
