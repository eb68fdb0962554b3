"""The words of the stories: nouns by class, verbs and adjectives. Verbs agree in number with their subjects."""

SINGULAR, PLURAL = 0, 1
PRONOUNS = {"he": "him", "she": "her", "it": "it", "they": "them"}  # {subject: object}
NOUNS = {  # {class: {(singular, plural): pronoun of the singular}}
    "person": {
        ("man", "men"): "he",
        ("boy", "boys"): "he",
        ("king", "kings"): "he",
        ("woman", "women"): "she",
        ("girl", "girls"): "she",
        ("queen", "queens"): "she",
    },
    "animal": {("cat", "cats"): "it", ("dog", "dogs"): "it", ("bird", "birds"): "it", ("horse", "horses"): "it"},
    "thing": {("box", "boxes"): "it", ("ball", "balls"): "it", ("book", "books"): "it", ("cup", "cups"): "it"},
}
TRANSITIVE = (("sees", "see"), ("likes", "like"), ("finds", "find"), ("chases", "chase"), ("follows", "follow"))
TO_BE = ("is", "are")
INTRANSITIVE = {
    "person": (("laughs", "laugh"), ("sings", "sing")),
    "animal": (("eats", "eat"), ("hides", "hide")),
    "thing": (("falls", "fall"), ("breaks", "break")),
}
PREDICATES = {"person": ("polite", "clever"), "animal": ("hungry", "wild"), "thing": ("heavy", "empty")}
ADJECTIVES = ("big", "small", "black", "white")
DETERMINERS = {"the": (SINGULAR, PLURAL), "a": (SINGULAR,), "two": (PLURAL,), "some": (PLURAL,)}
VERBS = (*TRANSITIVE, TO_BE, *(verb for verbs in INTRANSITIVE.values() for verb in verbs))
OTHER_NUMBER = {verb[number]: verb[1 - number] for verb in VERBS for number in (SINGULAR, PLURAL)}
ALL_CLASSES, ANIMATE = tuple(NOUNS), ("person", "animal")
