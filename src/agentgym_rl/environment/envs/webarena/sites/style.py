"""Page layout of the embedded sites: one style sheet, with a colour per site."""

from __future__ import annotations

from dataclasses import dataclass

from agentgym_rl.environment.envs.webarena.sites.html import Child, Html, a, el, join

CSS = """
*{box-sizing:border-box}
body{margin:0;font:15px/1.45 "Liberation Sans","DejaVu Sans",Arial,sans-serif;color:#20242a;background:#f4f5f7}
header{background:var(--main);color:#fff;display:flex;align-items:center;gap:18px;padding:9px 28px;flex-wrap:wrap}
header a{color:#fff;text-decoration:none} header a:hover{text-decoration:underline}
header .brand{font-weight:700;font-size:20px;margin-right:8px} header form{margin-left:auto;display:flex;gap:6px}
header label{font-size:13px;display:flex;align-items:center;gap:6px;margin:0}
nav.sub{background:#fff;border-bottom:1px solid #dde1e6;padding:7px 28px;display:flex;gap:16px;flex-wrap:wrap}
main{max-width:1160px;margin:14px auto 40px;padding:0 20px}
h1{font-size:23px;margin:4px 0 10px} h2{font-size:18px;margin:16px 0 8px} h3{font-size:15px;margin:0 0 3px}
a{color:var(--link)} p{margin:4px 0 8px}
.card{background:#fff;border:1px solid #dde1e6;border-radius:8px;padding:12px 16px;margin:0 0 10px}
.grid{display:grid;grid-template-columns:repeat(4,1fr);gap:10px}.grid .card{margin:0}
.two{display:grid;grid-template-columns:2fr 1fr;gap:16px;align-items:start}
.thumb{height:64px;border-radius:6px;margin-bottom:7px;display:flex;align-items:center;justify-content:center;font-size:24px;
font-weight:700;color:#fffc;background:linear-gradient(135deg,hsl(var(--h) 45% 62%),hsl(var(--h) 50% 42%))}
.inline+.card{margin-top:10px}.big{height:150px;font-size:48px}
.price{font-weight:700} .muted{color:#66707c;font-size:13px} .flash{background:#e5f6e8;border:1px solid #9fd3a8;
border-radius:8px;padding:8px 14px;margin:0 0 10px}.tag{display:inline-block;background:#e9edf3;border-radius:10px;
padding:0 9px;font-size:12.5px;margin-right:4px}
.good{background:#d9f2de}.bad{background:#fbdedb}.wait{background:#fdf0cd}
table{border-collapse:collapse;width:100%;background:#fff;border:1px solid #dde1e6;border-radius:8px;margin:0 0 10px}
th{text-align:left;font-size:13px;color:#55606d;background:#fafbfc}
th,td{padding:5px 11px;border-bottom:1px solid #e9ecf0}
caption{text-align:left;font-weight:700;padding:4px 0}
dl.facts{display:grid;grid-template-columns:150px 1fr;gap:3px 10px;margin:4px 0 8px}dt{color:#66707c}dd{margin:0}
form{margin:4px 0}label{display:block;margin:5px 0;font-size:14px}label.row{display:inline-block;margin-right:12px}
input,select,textarea{font:inherit;padding:4px 7px;border:1px solid #b9c1cb;border-radius:5px}
textarea,input.wide{width:100%;display:block} form.inline{display:inline-block;margin:0 4px 0 0}
fieldset{border:1px solid #dde1e6;border-radius:6px;margin:6px 0;padding:4px 12px}
button{font:inherit;background:var(--main);color:#fff;border:0;border-radius:5px;padding:5px 13px;cursor:pointer}
form.inline button,button.quiet{background:#e9edf3;color:#20242a;padding:3px 10px}
.post{display:grid;grid-template-columns:118px 1fr;gap:10px;align-items:start}
.comment{border-left:3px solid #dde1e6;padding:2px 0 2px 12px;margin:8px 0}
.stars{color:#b7791f}.pager{margin-top:10px} ul.plain{list-style:none;padding:0;margin:0}
"""


@dataclass(frozen=True, slots=True)
class Look:
    """Settings shared by all pages of a site."""

    brand: str
    colour: str
    links: tuple[tuple[str, str], ...]
    """Text and address of the links at the top."""
    search: tuple[str, str] | None = None
    """Label and address of the search field at the top, which sends `q`."""
    user: str = ""


def page(look: Look, title: str, *body: Child, heading: str = "", flash: str = "", below: Child = None) -> Html:
    """Return a whole document. `heading` defaults to the title; `below` is a second row of navigation."""
    search = None
    if look.search:
        search = el(
            "form",
            el("label", look.search[0], el("input", type="search", name="q", size="26")),
            el("button", "Search"),
            action=look.search[1],
            method="get",
            role="search",
        )
    head = join(
        el("meta", charset="utf-8"),
        el("title", f"{title} - {look.brand}"),
        el("link", rel="icon", href="data:,"),
        el("style", Html(f":root{{--main:{look.colour};--link:{look.colour}}}{CSS}")),
    )
    top = el(
        "header",
        a(look.brand, "/", class_="brand"),
        [a(text, href) for text, href in look.links],
        search,
        el("span", look.user, class_="muted", style="color:#ffffffcc") if look.user else None,
    )
    notice = el("p", flash, class_="flash", role="status") if flash else None
    sub = el("nav", below, class_="sub") if below else None
    main = el("main", notice, el("h1", heading or title), *body)
    return Html(f'<!DOCTYPE html><html lang="en">{el("head", head)}{el("body", top, sub, main)}</html>')
