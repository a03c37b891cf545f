"""The embedded default: a small real model behind SGLang's interface. Nothing imports from here."""
