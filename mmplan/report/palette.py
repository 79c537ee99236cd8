"""Colours of actions: the hue is the modality, forward is light, backward is strong."""

# Colour-blind safe pairs (Paul Tol, "Colour Schemes", SRON/EPS/TN/09-002, 2021: light and bright variants).
FORWARD = {"vision": "#77AADD", "audio": "#BBCC33", "text": "#FFAABB", "speech": "#EEDD88", "mixed": "#DDDDDD"}
BACKWARD = {"vision": "#4477AA", "audio": "#228833", "text": "#EE6677", "speech": "#CCBB44", "mixed": "#777777"}
WEIGHT_GRADIENT = "#AA3377"
REDUCE = "#444444"
STEP = "#AAAAAA"
TRANSFER = "#66CCEE"


def colour(kind: str, modality: str) -> str:
    """Fill colour of an action; unknown modalities are grey."""
    fixed = {"W": WEIGHT_GRADIENT, "REDUCE": REDUCE, "TIE": REDUCE, "STEP": STEP, "SEND": TRANSFER, "RECV": TRANSFER}
    if kind in fixed:
        return fixed[kind]
    shades = FORWARD if kind == "F" else BACKWARD
    return shades.get(modality, shades["mixed"])
