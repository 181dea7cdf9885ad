"""Word lists of the language, split into a part that training shows and a part that only held-out questions use."""

from __future__ import annotations

import zlib

_NOUNS = """
depth width height length weight price cost rate speed level colour shape size age owner keeper guide captain driver
harbour bridge tower garden market station library museum theatre school hospital castle chapel mill farm forest valley
river lake island mountain canyon desert meadow orchard vineyard quarry mine tunnel canal dam well spring fountain
street square corner gate wall fence roof door window stair cellar kitchen pantry table chair lamp mirror carpet curtain
blanket pillow basket barrel bottle kettle teapot plate bowl spoon knife ladle oven stove anvil hammer chisel saw plane
drill wrench ladder rope chain anchor sail mast rudder oar compass sextant telescope lantern candle torch beacon signal
flag banner badge medal trophy coin stamp ticket voucher receipt invoice ledger contract letter parcel crate cargo
freight wagon carriage engine boiler piston valve gauge dial clock watch calendar diary journal notebook pencil brush
canvas easel palette statue portrait sketch poster map chart atlas globe route track path trail road lane highway
crossing ferry barge canoe raft kayak yacht tanker cruiser shuttle rocket orbit comet planet moon star galaxy crater
glacier geyser volcano lagoon reef dune delta swamp marsh pond stream creek waterfall rapids shore beach cliff cave
cavern grotto summit ridge slope plateau plain prairie jungle grove thicket hedge bush fern moss lichen mushroom berry
cherry plum peach pear apple orange lemon melon grape olive walnut almond chestnut acorn wheat barley oats rye maize
rice bean lentil pea carrot turnip radish onion garlic leek cabbage lettuce spinach pepper ginger saffron cinnamon
honey butter cheese cream yoghurt bread biscuit cake pastry noodle soup stew sauce salad roast supper banquet menu
recipe cook baker butcher grocer tailor weaver potter smith carpenter mason plumber painter sculptor singer dancer actor
author poet editor printer teacher student doctor nurse dentist lawyer judge sheriff mayor senator consul envoy herald
knight squire archer guard scout ranger hunter fisher farmer shepherd miller sailor pilot navigator astronomer chemist
botanist geologist engineer architect surveyor inspector auditor clerk cashier broker banker merchant trader vendor
customer guest visitor tenant landlord neighbour cousin uncle nephew partner rival champion referee coach trainer goalie
striker bowler skater skier rower runner jumper rider jockey horse donkey camel llama goat sheep cow bull pig hen duck
goose turkey pigeon raven eagle falcon owl heron stork swan parrot sparrow robin finch trout salmon perch pike carp eel
shark whale dolphin seal otter beaver badger fox wolf bear lynx panther tiger lion zebra giraffe hippo rhino elephant
monkey gorilla lizard gecko turtle tortoise frog toad newt snail beetle cricket moth wasp hornet bee ant spider
violin cello flute oboe trumpet trombone tuba drum cymbal harp piano organ guitar banjo melody rhythm chorus anthem
opera ballet concert festival parade carnival lottery auction contest puzzle riddle rumour legend fable novel chapter
verse title caption headline column bulletin forecast archive catalogue index register record entry balance budget
deposit pension salary bonus tariff quota permit licence passport visa warrant verdict treaty statute charter motto
password keyword pattern texture fabric cotton linen velvet silk leather copper silver bronze marble granite amber
crystal emerald sapphire ruby diamond pearl coral ivory charcoal plaster cement gravel timber lumber
"""
_WITHHELD = ("forecast",)  # weather words stay out of the data altogether, so that a weather tool is a new one

_PARAMS = """
place site target item object name label subject source origin destination region district area zone room floor shelf
box slot lane seat row team group member person client account order number code key tag mark amount count total limit
start end day hour minute month year week period duration distance radius angle volume power mode style format language
currency unit scale grade rank priority status note comment message topic field category kind version channel port
address phone email host folder file page section line stage round turn phase batch series
"""
_VERBS = "get find fetch read check show look_up query list report measure count track locate inspect"
_ACTS = "book create add send set open close start stop move save remove update order plan print pack paint build mark"
_ENUMS = """
metres feet litres gallons grams pounds inches miles knots degrees euros francs crowns points percent hours minutes days
red green blue white black yellow small medium large fast slow short long plain fancy early late north south east west
"""
_ADJ = """
old new small large quiet busy red green blue grey dark bright cold warm dry wet long short tall narrow wide empty full
early late slow quick heavy light rough smooth plain pretty kind brave clever lazy calm proud gentle steep hollow round
"""
_FILL = """
people boat boats wind rain morning evening night summer winter autumn song story work walk talk dinner coffee tea
paper wood stone glass sand snow cloud light shadow colour dream memory joke game friend friends child children dog cat
bird birds fish tree trees flower flowers grass field house houses village town shop shops train trains bus car cars
"""
_FILL_VERBS = "likes finds keeps brings needs sees hears leaves follows passes crosses watches carries holds wants"


def _reserved(word: str) -> bool:
    """About one word in seven is never shown in training."""
    return zlib.crc32(word.encode()) % 7 == 3


def _split(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    words = [w for w in dict.fromkeys(text.split()) if w not in _WITHHELD]
    return tuple(w for w in words if not _reserved(w)), tuple(w for w in words if _reserved(w))


NOUNS, HELD_OUT_NOUNS = _split(_NOUNS)
PARAMS, HELD_OUT_PARAMS = _split(_PARAMS)
HELD_OUT = frozenset((*HELD_OUT_NOUNS, *HELD_OUT_PARAMS))
VERBS = tuple(_VERBS.split())
ACTS = tuple(_ACTS.split())
ENUMS = tuple(dict.fromkeys(_ENUMS.split()))
ADJECTIVES = tuple(dict.fromkeys(_ADJ.split()))
FILLERS = tuple(dict.fromkeys(_FILL.split()))
FILLER_VERBS = tuple(_FILL_VERBS.split())
OTHER_ROLES = frozenset((*VERBS, *ACTS, *ENUMS, *ADJECTIVES, *FILLERS))
"""Words that training shows as verbs, choices or filling, also where they are held out as nouns."""
