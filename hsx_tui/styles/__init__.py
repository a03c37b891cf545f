"""The look: one style sheet and one theme."""

from __future__ import annotations

from pathlib import Path

from textual.theme import Theme

STYLE_SHEET = Path(__file__).with_name("console.tcss")

# Okabe and Ito's colours, lightened for a dark ground: they stay apart for colour-blind eyes.
HSX_DARK = Theme(
    name="hsx-dark",
    primary="#56B4E9",
    secondary="#CC79A7",
    accent="#56B4E9",
    success="#2EC79A",
    warning="#E69F00",
    error="#F0743E",
    foreground="#E4E4E4",
    background="#101418",
    surface="#161B21",
    panel="#1D242C",
    dark=True,
    variables={
        "panel-rule": "#4A5764",
        "text-muted": "#93A1AE",
        "block-cursor-foreground": "#101418",
        "button-focus-text-style": "bold",
    },
)
