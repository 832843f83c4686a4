"""SearchQA: answer questions of one or several hops by searching a corpus (deep search)."""

from agentgym_rl.environment.envs.searchqa.env import SearchQA, load_searchqa, searchqa_from
from agentgym_rl.environment.envs.searchqa.indexing import build_index, open_retriever
from agentgym_rl.environment.envs.searchqa.passages import Passage
from agentgym_rl.environment.envs.searchqa.retrieval import Retriever

__all__ = ["Passage", "Retriever", "SearchQA", "build_index", "load_searchqa", "open_retriever", "searchqa_from"]
