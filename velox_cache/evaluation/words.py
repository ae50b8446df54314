"""Words that tasks are made of: common, short, unlike each other."""

_NOUNS = """
anchor apple basket bridge butter candle carpet castle cherry copper cotton desert dragon engine feather flower forest
garden guitar hammer harbor helmet island jacket jungle kettle ladder lantern lemon marble meadow mirror monkey mountain
orange oyster pepper piano pillow planet pocket rabbit river rocket saddle silver spider stable sugar temple thunder
ticket tiger tunnel turtle velvet violin wagon walnut window winter
"""
_PLACES = """
lighthouse bakery museum library airport theater hospital stadium market prison chapel brewery factory embassy monastery
observatory aquarium orchard shipyard quarry
"""
_PEOPLE = "Alice Bruno Clara David Emma Felix Grace Hugo Irene Jacob Karin Louis Maria Nora Oscar Paula"
_CITIES = "Athens Berlin Cairo Dublin Geneva Havana Lisbon London Madrid Moscow Oslo Paris Prague Rome Tokyo Vienna"

NOUNS, PLACES, PEOPLE, CITIES = (tuple(words.split()) for words in (_NOUNS, _PLACES, _PEOPLE, _CITIES))
