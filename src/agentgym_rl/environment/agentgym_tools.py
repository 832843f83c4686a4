"""Instructions of the environments that AgentGym's servers play: the task, the action format, the tools."""

from __future__ import annotations

WEBSHOP = """\
You shop online. The first page states what to buy: a kind of product, some of its properties, options such as a \
colour or a size, and a price that it must stay below. Find a product that fits, choose its options and buy it. Parts \
of a page are separated by [SEP].

Each turn, reply with exactly one action and nothing else:
- search[words]: search for products. Only on a page with a Search button.
- click[text]: click on a button, a product's code, or an option of the page, for example click[b0010x2k4m], \
click[next >], click[large] or click[buy now].

An action that the page does not have changes nothing. The episode ends when you click Buy Now. The reward is 1 if the \
product, its options and its price are all as asked, and less the more of them differ."""

ALFWORLD = """\
You act in a household. The first message describes the room and gives your task, such as putting a clean mug on a \
shelf. Each message ends with AVAILABLE ACTIONS, the actions that are possible at this moment.

Each turn, reply with exactly one of these actions and nothing else. Their forms:
- go to PLACE; open PLACE; close PLACE; examine THING; look; inventory
- take THING from PLACE; put THING in/on PLACE
- clean THING with PLACE (a sinkbasin); heat THING with PLACE (a microwave); cool THING with PLACE (a fridge)
- use THING, to switch on a lamp

Names end with a number, for example: go to countertop 1. You can hold one thing at a time. Things inside a closed \
place are hidden until you open it. If the answer is "Nothing happens", the action was not possible."""

SQLGYM = """\
You answer a question about an SQLite database. The message describes the tables and their keys, then asks the question.

Reply with one SQL statement in one line that returns the answer, and nothing else. It is executed, and its rows are \
compared with the right ones. You have one attempt. For example:
SELECT name FROM city WHERE population > 1000000"""

_CALLS = """

Each turn, reply with exactly one call in one line and nothing else, in this form:
NAME with Action Input: {"argument": value}
For example: %s
The input is a Python dictionary; a call without arguments has {}. Do not invent codes or coordinates: get them from \
the tools."""

WEATHER = (
    """\
You answer a question about the weather with tools. Dates are written YYYY-MM-DD. PLACE stands for the two arguments \
latitude and longitude, DATES for start_date and end_date.

- get_user_current_date(), get_user_current_location(): the user's date and city
- get_latitude_longitude(name): coordinates of a city
- get_historical_temp(PLACE, DATES), get_historical_rain(PLACE, DATES), get_historical_snow(PLACE, DATES): past days
- get_historical_air_quality_index(PLACE, DATES): past days
- get_current_temp(PLACE, current_date), get_current_rain(PLACE, current_date), get_current_snow(PLACE, current_date), \
get_current_air_quality_index(PLACE, current_date): one day
- get_temp_forecast(PLACE, DATES), get_rain_forecast(PLACE, DATES), get_snow_forecast(PLACE, DATES): coming days
- get_air_quality_level(air_quality_index): a word such as good, fair or poor
- get_elevation(PLACE), get_distance(latitude1, longitude1, latitude2, longitude2) in kilometres
- check_valid_actions(): the names of the tools
- finish(answer): give the answer, as a string, a number or a list, and end the task"""
    + _CALLS % 'get_latitude_longitude with Action Input: {"name": "Berlin"}'
)

MOVIE = (
    """\
You answer a question about films and the people who make them with tools.

- get_search_movie(movie_name): a film's id, title and overview
- get_movie_details(movie_id): budget, genres, revenue, average vote, release date
- get_movie_production_companies(movie_id), get_movie_production_countries(movie_id), get_movie_keywords(movie_id)
- get_movie_cast(movie_id), get_movie_crew(movie_id): ten people each; the crew lists directors, producers and writers
- get_movie_alternative_titles(movie_id), get_movie_translation(movie_id)
- get_search_person(person_name): a person's id and name
- get_person_details(person_id): biography, birthday, place of birth
- get_person_cast(person_id), get_person_crew(person_id): ten films each
- get_person_external_ids(person_id): ids of IMDb and of social networks
- check_valid_actions(): the names of the tools
- finish(answer): give the answer, as a string, a number or a list, and end the task"""
    + _CALLS % 'get_search_movie with Action Input: {"movie_name": "Metropolis"}'
)

ACADEMIA = (
    """\
You answer a question about papers and their authors with tools. Two graphs exist: in PaperNet, papers are connected \
by citations; in AuthorNet, authors are connected by joint papers. Load a graph before you use it.

- loadPaperNet(), loadAuthorNet()
- neighbourCheck(graph, node): neighbours of a node; graph is PaperNet or AuthorNet
- paperNodeCheck(node): year, venue, citations, keywords and authors of a paper
- authorNodeCheck(node): name and organisation of an author
- authorEdgeCheck(node1, node2): papers that two authors wrote together
- paperEdgeCheck(node1, node2): the citation between two papers
- check_valid_actions(): the names of the tools
- finish(answer): give the answer, as a string, a number or a list, and end the task"""
    + _CALLS % 'neighbourCheck with Action Input: {"graph": "AuthorNet", "node": "Ada Moser"}'
)

SHEET = (
    """\
You edit a spreadsheet as the task asks, with tools. Cells are named like B2; rows and columns count from 1. Open the \
sheet that the task names first, look at its values, and call finish when it is as asked. Freeze the first row before \
you sort.

- open_sheet(name), del_sheet(name)
- get_all_values(), get_range_values(start_position, end_position), get_cell_value(position)
- get_A1_annotation(row, col): the name of a cell
- filter_cells(query, in_row, in_column): cells that match; in_row and in_column may be left out
- get_value_by_formula(start_position, end_position, operator), or with position_list instead of the two positions; \
operator is SUM, AVERAGE, COUNT, MAX, MIN, MINUS or PRODUCT
- update_cell_by_formula(start_position, end_position, result_position, operator), or with position_list
- update_cell(position, value), update_range(start_position, end_position, values_list)
- insert_rows(values_list, row_idx), insert_cols(values_list, col_idx); values_list is a list of lists
- delete_batch_data(dimension, index_list); dimension is row or col
- sort_sheet_by_col(col_num, order); order is asc or des
- freeze_data(dimension, num); dimension is rows or columns
- merge_cells(start_position, end_position), get_note(position), update_note(position, content)
- finish(): end the task"""
    + _CALLS % 'open_sheet with Action Input: {"name": "Sheet3"}'
)

TODO = (
    """\
You answer questions about a to-do list, or change it as asked, with tools. Dates are written YYYY-MM-DD. Tasks have a \
priority from 1 (normal) to 4 (urgent).

- get_user_current_date(), get_user_current_location(): the user's date and city
- get_projects(): projects with their ids
- update_project(project_id, is_favorite); is_favorite is "True" or "False"
- get_tasks(project_id): tasks with their ids, names, priorities and due dates
- get_task_description(task_id): place and tips
- get_task_duration(task_id)
- complete_task(task_id), update_task(task_id, due_date), delete_task(task_id)
- check_valid_actions(): the names of the tools
- finish(answer): give the answer and end the task; if the task was to change something, the answer is "done\""""
    + _CALLS % 'get_tasks with Action Input: {"project_id": "12345"}'
)
