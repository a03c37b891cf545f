"""The target model in transformers: its lowest layers for evidence, its norm, a lone forward for
verification."""
