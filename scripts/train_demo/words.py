"""Fixed word lists of the generated tasks. Their order is part of the data: facts and held-out pairs follow it."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Every word is one token of the demo tokenizer when a blank precedes it.
KEYS = _words(
    """
    acorn amber anchor anvil apple arrow aspen atlas badger barrel basil basket beacon beaver bell berry birch bison
    blanket boat bottle bridge broom brush bucket button cabin cactus camel candle canyon carpet castle cedar chalk
    cherry circle citron clover cobra comet compass copper coral cotton cradle crane crayon cricket crown crystal
    dagger daisy desk diamond dolphin dragon drum eagle easel ember engine falcon feather fennel ferry fiddle flag
    flute forest fossil fountain fox garden garnet ginger glacier globe goblet grape guitar hammer harbor harp hawk
    hazel helmet heron honey horn island ivory jacket jaguar jasmine jewel jungle kettle kite ladder lagoon lantern
    lemon leopard lily lizard lobster locket lotus magnet mango maple marble meadow melon mirror monkey moss motor
    needle nettle nickel oasis olive onion opal orange orchid otter oyster paddle palace panda panther paper parrot
    peach pearl pebble pencil pepper piano pigeon pillow pine planet plum pocket pony poplar pumpkin puzzle quartz
    quilt rabbit radio raven ribbon rocket rose ruby saddle salmon scarf shell silver sparrow spider spoon squirrel
    statue swan
    """
)
VALUES = _words(
    """
    table tiger timber toast tower train trumpet tulip tunnel turtle umbrella valley velvet violin walnut whale
    wheel willow window winter wizard wolf zebra zipper almond antler badge bamboo banner barn bench blossom bonnet
    branch brick bronze cable cake canoe carrot cart cave cheese chimney clock cloud coffee collar cookie corn couch
    cream crow cube curtain desert dish dock donkey dove eel elbow fence fig finger flame floor fork frog gate
    ghost giraffe glass glove goat goose grain gravel hamster hat hedge hill hippo hood hook house icicle igloo ink
    iron jar jelly kennel key king kitten knot lake lamb lamp lark leaf lime lion log magpie mast mint mole moon
    mouse mug mule nail nest net nut oak oar oven owl page paint pan path pea pear pen pie pig pipe plate plow
    pond pot prince purse queen rail rain rat reed ring river road robin rock roof root rope sail salt sand seal
    seed shark sheep ship shoe shrimp sky sled snail snow soap sock spade spear star stone storm stove straw sugar
    sun sword tape tea tent thorn thread thumb tooth torch toy tree trout truck vase vine wagon wasp wave wax well
    wheat whip wing wood wool worm yak yarn
    """
)
NAMES = _words(
    """
    Adam Alice Anna Ben Bruno Carl Clara David Dora Edgar Ella Emma Eric Eva Felix Fred Grace Greta Hanna Henry Hugo
    Ida Iris Ivan Jack Jane John Julia Karl Kate Laura Leo Lily Lucas Maria Mark Mia Nina Nora Oscar Otto Paul Peter
    Rosa Ruth Sam Sara Simon Sofia Theo Tom Vera Victor Walter
    """
)
CITIES = _words(
    """
    Athens Berlin Bern Boston Cairo Delhi Dublin Geneva Hanoi Kyoto Lima Lisbon London Madrid Milan Moscow Munich
    Nairobi Oslo Paris Prague Quito Riga Rome Seoul Sofia Sydney Tokyo Turin Vienna Warsaw Zurich
    """
)
JOBS = _words("baker carpenter cook doctor driver farmer judge lawyer nurse painter pilot poet sailor singer teacher")
COLOURS = _words("black blue brown gold green grey orange pink purple red silver white yellow")
PETS = _words("bird cat dog fish goat hamster horse lizard parrot pig pony rabbit snake turtle")
