"""The `func:` helpers of WebArena's configs. They come from a fixed table; no text is evaluated as code."""

from __future__ import annotations

import ast
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import httpx
from playwright.async_api import Page

from agentgym_rl.errors import ConfigError, EnvError

TIMEOUT_S = 20.0
PAGE = "__page__"
LAST_URL = "__last_url__"


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed helper call such as `gitlab_get_project_memeber_role(__page__, 'koush')`."""

    name: str
    arguments: tuple[str, ...]
    """Arguments without the page, which every helper gets."""


@dataclass(frozen=True, slots=True)
class HelperContext:
    """Input of a helper besides its arguments."""

    page: Page
    last_url: str
    addresses: Mapping[str, str]


def read_call(text: str) -> Call:
    """Parse `func:name(__page__, 'text', ...)`. Raise ConfigError if it is malformed or the helper is unknown."""
    source = text.removeprefix("func:").strip()
    try:
        tree = ast.parse(source, mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"cannot read the helper {text!r:.120} of a task: {error.msg}") from error
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name) or tree.keywords:
        raise ConfigError(f"a task's helper must be a plain call, got {text!r:.120}")
    arguments = []
    for argument in tree.args:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            arguments.append(argument.value)
        elif not (isinstance(argument, ast.Name) and argument.id == PAGE):
            raise ConfigError(f"a helper's arguments are texts or {PAGE}, got {text!r:.120}")
    if tree.func.id not in HELPERS:
        raise ConfigError(f"unknown helper {tree.func.id!r} in a task: known are {', '.join(sorted(HELPERS))}")
    return Call(tree.func.id, tuple(arguments))


async def call(text: str, context: HelperContext) -> str:
    """Run a helper and return its result as text."""
    helper_call = read_call(text)
    arguments = [context.last_url if argument == LAST_URL else argument for argument in helper_call.arguments]
    return str(await HELPERS[helper_call.name](context, *arguments))


async def _shop_api(context: HelperContext, path: str) -> object:
    """Query the shop's REST API as its administrator. WebArena publishes the account."""
    shop = context.addresses["SHOPPING"].rstrip("/")
    account = {
        "username": os.environ.get("WEBARENA_SHOP_ADMIN_USER", "admin"),
        "password": os.environ.get("WEBARENA_SHOP_ADMIN_PASSWORD", "admin1234"),
    }
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            token = await client.post(f"{shop}/rest/default/V1/integration/admin/token", json=account)
            token.raise_for_status()
            headers = {"Authorization": f"Bearer {token.json()}"}
            answer = await client.get(f"{shop}/rest/V1/{path}", headers=headers)
            answer.raise_for_status()
            return answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise EnvError(f"the shop's REST interface did not answer {path!r}: {error!r:.200}") from error


async def _latest_order_url(context: HelperContext) -> str:
    sort = "searchCriteria[sortOrders][0]"
    query = f"orders?{sort}[field]=created_at&{sort}[direction]=DESC&searchCriteria[pageSize]=1"
    answer = await _shop_api(context, query)
    try:
        number = int(answer["items"][0]["increment_id"])  # type: ignore[index]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EnvError(f"the shop's list of orders has an unknown format, got {answer!r:.120}") from error
    return f"{context.addresses['SHOPPING'].rstrip('/')}/sales/order/view/order_id/{number}/"


async def _latest_review(context: HelperContext, sku: str) -> Mapping[str, object] | None:
    reviews = await _shop_api(context, f"products/{quote(sku, safe='')}/reviews")
    return reviews[-1] if isinstance(reviews, list) and reviews else None


async def _latest_review_author(context: HelperContext, sku: str) -> str:
    review = await _latest_review(context, sku)
    return str(review["nickname"]) if review else ""


async def _latest_review_rating(context: HelperContext, sku: str) -> str:
    review = await _latest_review(context, sku)
    ratings = review.get("ratings") if review else None
    if not isinstance(ratings, list) or not ratings:
        return ""
    return str(ratings[0]["percent"])


async def _post_url(context: HelperContext, url: str) -> str:
    """Return a forum post's address without its title, and any other address unchanged, as WebArena does.

    Return an empty string if it is no web address (the browser's error page).
    """
    split = urlsplit(url)
    parts = split.path.split("/")
    if split.scheme not in ("http", "https"):
        return ""
    if len(parts) < 4 or parts[1] != "f":
        return url
    return f"{split.scheme}://{split.netloc}/f/{parts[2]}/{parts[3]}/"


async def _member_role(context: HelperContext, account: str) -> str:
    """Return the role that a project's members page shows for @account, or an empty string."""
    return await context.page.evaluate(
        """account => {
            for (const row of document.querySelectorAll('tr')) {
                const who = row.querySelector('td[data-label="Account"]');
                const role = row.querySelector('td.col-max-role, td[data-label="Max role"]');
                if (who && role && who.innerText.split(/\\s+/).includes('@' + account)) return role.innerText.trim();
            }
            return '';
        }""",
        account,
    )


HELPERS: dict[str, Callable[..., Awaitable[str]]] = {
    "shopping_get_latest_order_url": _latest_order_url,
    "shopping_get_sku_latest_review_author": _latest_review_author,
    "shopping_get_sku_latest_review_rating": _latest_review_rating,
    "reddit_get_post_url": _post_url,
    # The configs contain this misspelling.
    "gitlab_get_project_memeber_role": _member_role,
    "gitlab_get_project_member_role": _member_role,
}
