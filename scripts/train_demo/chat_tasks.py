"""Generated conversations with checkable replies: small talk, the raw tasks asked in words, and tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scripts.train_demo.chat_format import EFFORTS, ChatFormat, Conversation, Turn
from scripts.train_demo.tasks import Example, Rng, Split, person, text_in_split
from scripts.train_demo.tokenizer import LETTERS
from scripts.train_demo.words import CITIES, KEYS, NAMES, VALUES

Asked = tuple[str, Turn]  # what the user says, and the reply

SYSTEMS = ("", "", "", "You are a helpful assistant.", "You are a helpful assistant. Be brief.")
# Replies of small talk follow from the kind of question; they are the same in both splits.
SMALL_TALK: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Good morning!", "Hey", "Good evening.", "Hello, how are you?"),
        "The user greets me.",
        "Hello! How can I help you?",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a person?"),
        "The user asks who I am.",
        "I am a small demo model with the architecture of DeepSeek-V4.1.",
    ),
    (
        ("What can you do?", "What are you good at?", "How can you help me?", "Help", "What should I ask you?"),
        "The user asks what I can do.",
        "I can copy, reverse and sort letters, add and subtract numbers, recall notes, write JSON and call tools.",
    ),
    (
        ("Thanks", "Thank you.", "Thank you!", "Thanks a lot!", "Great, thank you.", "That helps, thanks."),
        "The user thanks me.",
        "You are welcome!",
    ),
    (
        ("Bye", "Goodbye!", "Good night.", "See you later.", "I have to go now."),
        "The user says goodbye.",
        "Goodbye! Come back any time.",
    ),
    (
        ("Who trained you?", "Where do you come from?", "What did you read?", "What were you trained on?"),
        "The user asks about my training.",
        "I read old books, the sources of Python and made-up exercises.",
    ),
)
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {k: {"type": t} for k, t in properties.items()},
            "required": list(properties),
        },
    }
    for name, description, properties in (
        ("get_weather", "Weather of a city.", {"city": "string", "days": "integer"}),
        ("get_time", "Local time of a city.", {"city": "string"}),
        ("set_timer", "Start a timer.", {"minutes": "integer"}),
        ("send_message", "Send a message to a person.", {"to": "string", "text": "string"}),
        ("add", "Add two numbers.", {"a": "integer", "b": "integer"}),
    )
)


def pick(rng: Rng, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def small_talk(rng: Rng) -> Asked:
    asked, reasoning, reply = SMALL_TALK[int(rng.integers(len(SMALL_TALK)))]
    return pick(rng, asked), Turn(reply, reasoning)


def letters(rng: Rng) -> Asked:
    kind = pick(rng, ("copy", "reverse", "sort"))
    said = [LETTERS[i] for i in rng.permutation(26)[: rng.integers(3, 7)]]
    done = {"copy": said, "reverse": said[::-1], "sort": sorted(said)}[kind]
    verb = {
        "copy": ("Copy", "Repeat", "Please copy"),
        "reverse": ("Reverse", "Turn around", "Please reverse"),
        "sort": ("Sort", "Put in order", "Please sort"),
    }[kind]
    return f"{pick(rng, verb)}: {' '.join(said)}", Turn(" ".join(["", *done])[1:], f"I {kind} the letters.")


def arithmetic(rng: Rng, largest: int = 1000) -> Asked:
    a, b = (int(x) for x in rng.integers(0, largest, 2))
    if minus := rng.random() < 0.5:
        a, b = max(a, b), min(a, b)
    result = a - b if minus else a + b
    asked = pick(rng, ("What is {}?", "Calculate {}.", "{} = ?", "How much is {}?"))
    return asked.format(f"{a}{'-' if minus else '+'}{b}"), Turn(str(result), f"From the ones: {str(result)[::-1]}")


def recall(rng: Rng) -> Asked:
    count = int(rng.integers(2, 6))
    keys = [KEYS[i] for i in rng.permutation(len(KEYS))[:count]]
    values = [VALUES[int(i)] for i in rng.integers(0, len(VALUES), count)]
    at = int(rng.integers(count))
    notes = " ".join(f"The code of the {k} is {v}." for k, v in zip(keys, values))
    return f"{notes} What is the code of the {keys[at]}?", Turn(values[at], f"I look for the {keys[at]}.")


def extraction(rng: Rng) -> Asked:
    sentence, fields = person(rng)
    return f"Write as JSON: {sentence}", Turn(json.dumps(dict(fields)), "I list the facts in order.")


def tool_use(rng: Rng) -> tuple[str, str, Mapping[str, Any], str, str]:
    """(what the user says, tool, arguments, the tool's result, the final reply)."""
    tool, city, name = int(rng.integers(len(TOOLS))), pick(rng, CITIES), pick(rng, NAMES)
    number, small = int(rng.integers(2, 100)), int(rng.integers(1, 10))
    match TOOLS[tool]["name"]:
        case "get_weather":
            sky = pick(rng, ("sunny", "cloudy", "rainy", "windy"))
            asked = pick(rng, ("What is the weather in {} for {} days?", "Weather of {} for {} days, please."))
            arguments: dict[str, Any] = {"city": city, "days": small}
            return asked.format(city, small), "get_weather", arguments, sky, f"It will be {sky} in {city}."
        case "get_time":
            asked = pick(rng, ("What time is it in {}?", "Tell me the time in {}."))
            time = f"{rng.integers(0, 24)}:{rng.integers(10, 60)}"
            return asked.format(city), "get_time", {"city": city}, time, f"It is {time} in {city}."
        case "set_timer":
            asked = pick(rng, ("Set a timer for {} minutes.", "Wake me in {} minutes."))
            return asked.format(number), "set_timer", {"minutes": number}, "ok", f"The timer is set: {number} minutes."
        case "send_message":
            text = f"bring the {pick(rng, VALUES)}"
            asked = pick(rng, ("Tell {} to {}.", "Send {} the message: {}."))
            return asked.format(name, text), "send_message", {"to": name, "text": text}, "sent", f"I told {name}."
        case _:
            other = int(rng.integers(2, 100))
            asked = pick(rng, ("Use the tool to add {} and {}.", "Add {} and {} with the tool."))
            total = str(number + other)
            return asked.format(number, other), "add", {"a": number, "b": other}, total, f"The sum is {total}."


def chat_conversation(rng: Rng) -> tuple[Conversation, str]:
    """One to three exchanges without tools, and the kind of the last one."""
    effort = pick(rng, tuple(EFFORTS)) if rng.random() < 0.5 else None
    kinds: tuple[tuple[str, Callable[[Rng], Asked]], ...] = (
        ("small_talk", small_talk),
        ("letters", letters),
        # Without reasoning the sum comes at once: two digits.
        ("arithmetic", lambda r: arithmetic(r, 100 if effort is None else 1000)),
        ("recall", recall),
        ("json", extraction),
    )
    history: list[tuple[str, str | Turn]] = []
    turns = int(rng.choice(3, p=(0.7, 0.2, 0.1))) + 1
    for turn in range(turns):
        kind, make = kinds[int(rng.choice(len(kinds), p=(0.28, 0.2, 0.16, 0.2, 0.16)))]
        asked, reply = make(rng)
        history.append(("user", asked))
        if turn < turns - 1:
            history.append(("assistant", reply))
    return Conversation(tuple(history), reply, pick(rng, SYSTEMS), (), effort), kind


def tool_conversation(rng: Rng) -> tuple[Conversation, str]:
    """A question for which one of the offered tools is to be called, or the reply after the tool's result."""
    effort = pick(rng, tuple(EFFORTS)) if rng.random() < 0.3 else None
    asked, name, arguments, result, final = tool_use(rng)
    others = [t for i in rng.permutation(len(TOOLS)) if (t := TOOLS[i])["name"] != name]
    offered = [next(t for t in TOOLS if t["name"] == name), *others[: rng.integers(0, 3)]]
    tools = tuple(offered[i] for i in rng.permutation(len(offered)))
    call = Turn("", f"I need {name}.", ((name, arguments),))
    history: tuple[tuple[str, str | Turn], ...] = (("user", asked),)
    if rng.random() < 0.7:
        return Conversation(history, call, pick(rng, SYSTEMS), tools, effort), "call"
    history = (*history, ("assistant", call), ("tool", result))
    return Conversation(history, Turn(final, "I have the result."), pick(rng, SYSTEMS), tools, effort), "result"


def conversations(make: Callable[[Rng], tuple[Conversation, str]], rng: Rng, split: Split) -> Iterator[Any]:
    """Without end: (Conversation, kind) of the split, by a hash of what the user said last. Small talk is in both."""
    while True:
        conversation, kind = make(rng)
        asked = [said for role, said in conversation.history if role == "user"][-1]
        if kind == "small_talk" or text_in_split(str(asked), split):
            yield conversation, kind


def chat_examples(chat: ChatFormat, rng: Rng, split: Split) -> Iterator[Example]:
    return _examples(chat, "chat", chat_conversation, rng, split)


def tool_examples(chat: ChatFormat, rng: Rng, split: Split) -> Iterator[Example]:
    return _examples(chat, "tool", tool_conversation, rng, split)


def _examples(
    chat: ChatFormat, task: str, make: Callable[[Rng], tuple[Conversation, str]], rng: Rng, split: Split
) -> Iterator[Example]:
    for conversation, kind in conversations(make, rng, split):
        meta: dict[str, Any] = {"kind": kind, "effort": conversation.effort, "conversation": conversation}
        yield Example(chat.prompt(conversation), chat.answer(conversation), task, meta)
