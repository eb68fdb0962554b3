"""The kinds of keys, {label: what a head with this label attends to}. Figures and pages read them from here."""

PLACES = {  # they do not depend on content
    "previous token": "the token before",
    "next token": "the token after",
    "self": "the token itself",
    "local window": "the token and its near neighbours",
    "first token": "the first token",
}
OF_CONTENT = {
    "delimiter": "line ends, punctuation and other symbols",
    "current word": "other tokens of the same word",
    "word start": "the first token of a word",
    "duplicate token": "earlier occurrences of the same token",
    "rare token": "rare tokens",
}
OF_PYTHON = {
    "matching bracket": "the matching bracket",
    "earlier use of a name": "earlier uses of the same name",
    "definition of a call": "the definition of the function that is called",
}
OF_STORIES = {
    "subject of the verb": "the subject of this verb",
    "subject of the next verb": "the subject of the verb that comes next",
    "object of the verb": "the object of this verb",
    "verb of the object": "the verb of this object",
    "antecedent of the pronoun": "the noun that this pronoun stands for",
    "determiner of the noun": "the determiner of this noun",
    "answer to the question": "the noun in the story that answers the question",
    "noun of the adjective": "the noun that this adjective describes",
    "earlier person": "earlier nouns that name persons",
    "earlier animal": "earlier nouns that name animals",
    "earlier thing": "earlier nouns that name things",
    "adjective of the noun": "the adjective before this noun",
    "noun of the same class": "other nouns of the same class: person, animal or thing",
}
OF_SOURCE = {  # of cross-attention
    "source separator": "the token before the source",
    "last source token": "the end of the source",
    "source delimiter": "punctuation in the source",
    "diagonal": "the same place in the source",
    "token read": "source tokens equal to the last one read",
    "token to write": "source tokens equal to the next one",
    "aligned": "the aligned source tokens",
}
OTHERS = {
    "fixed offset": "a token at one fixed distance",
    "induction": "the token that followed an earlier occurrence",
    "global": "all tokens about equally",
    "mixed": "no single kind of token",
}
MEANINGS = PLACES | OF_CONTENT | OF_PYTHON | OF_STORIES | OF_SOURCE | OTHERS
