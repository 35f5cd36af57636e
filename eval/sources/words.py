"""Word lists and made-up words of the builtin prompts. Everything is drawn from a `random.Random` of the sample."""

from __future__ import annotations

import random
import uuid

ADJECTIVES = tuple(
    "amber ancient autumn bold brave brisk bronze calm careful cheerful clever copper coral cosmic crimson "
    "curious daring distant dusty eager early elegant fancy fearless fragile frozen gentle giant golden graceful "
    "happy hazel hidden hollow humble indigo ivory jolly keen lazy lively lonely lucky lunar maple marble mellow "
    "mighty misty mossy modern narrow nimble noble olive orange patient plain playful polished proud purple quick "
    "quiet rapid restless rosy royal rustic salty scarlet secret shiny silent silver sleepy smooth snowy solar "
    "spare speedy steady stormy sturdy sunny swift tender tidy timid tranquil turquoise useful velvet violet "
    "vivid warm wise wooden young".split()
)
NOUNS = tuple(
    "acorn anchor badger balloon barrel basket beacon bicycle blanket bottle bridge bucket cabin camel candle canyon "
    "castle cherry chimney cloud compass cottage cradle cricket crystal curtain dolphin donkey dragon eagle easel "
    "engine falcon feather fiddle forest fountain garden glacier goblet hammer harbor harvest helmet hermit island "
    "jacket jaguar jungle kettle kitten ladder lagoon lantern lemon lizard magnet meadow mirror monkey mountain "
    "needle nutmeg octopus orchard otter oyster paddle parrot pebble pencil pepper piano pillow planet pocket pony "
    "pumpkin puzzle rabbit ribbon river rocket saddle sailor shadow shovel spider spoon stable statue sweater "
    "teapot temple thimble ticket tiger tractor trumpet tulip tunnel turtle umbrella valley violin walnut whistle "
    "window wizard yacht zebra".split()
)
FIRST_NAMES = tuple(
    "Ada Alma Anton Astrid Basil Bettina Boris Cecil Clara Cosima Dario Delia Edgar Elsa Emil Esther Felix Flora "
    "Gideon Greta Hanno Helga Hugo Ida Igor Irma Jasper Joan Kaspar Klara Leopold Lydia Magnus Marta Milo Nadia "
    "Nils Nora Olga Oscar Paula Pavel Quentin Ramona Rosa Rufus Selma Silas Tamara Tobias Ursula Vera Viktor Wanda "
    "Xaver Yara Yvonne Zeno".split()
)
CRAFTS = tuple(
    "baker barber beekeeper bookbinder brewer butcher carpenter clockmaker cooper dyer farmer fisher gardener glazier "
    "jeweller locksmith mason miller nurse painter pharmacist plumber potter printer roofer shepherd tailor tanner "
    "teacher weaver".split()
)
INSTRUMENTS = tuple(
    "accordion banjo bassoon cello clarinet cornet flute guitar harp horn lute mandolin oboe organ recorder trombone "
    "tuba viola xylophone zither".split()
)

_CONSONANTS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_CAPITALS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def coded_word(rng: random.Random, syllables: int = 3) -> str:
    """A lower-case word of consonant-vowel syllables, two letters each; equal lengths never contain each other."""
    return "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(syllables))


def unique(rng: random.Random, n: int, draw) -> list:
    """`n` different values of `draw(rng)`, in the order drawn. Raises RuntimeError after 50 n + 1000 draws."""
    found: dict = {}
    for _ in range(50 * n + 1000):
        if len(found) == n:
            break
        found.setdefault(draw(rng))
    if len(found) < n:
        raise RuntimeError(f"could not draw {n} different values")
    return list(found)


def pair_word(rng: random.Random) -> str:
    """An adjective and a noun with a hyphen, one of more than ten thousand."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def number(rng: random.Random, digits: int) -> str:
    """A decimal number of exactly `digits` digits."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def uuid_text(rng: random.Random) -> str:
    """A version-4 UUID drawn from `rng`."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def capitals(rng: random.Random, letters: int) -> str:
    """A name of capital letters without I and O, which read like digits."""
    return "".join(rng.choice(_CAPITALS) for _ in range(letters))


def place(rng: random.Random) -> str:
    """A made-up proper name of two English words, such as a town's."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}".title()


def surname(rng: random.Random) -> str:
    """A noun as a family name."""
    return rng.choice(NOUNS).capitalize()
