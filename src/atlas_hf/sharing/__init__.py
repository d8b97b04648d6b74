"""Giving models to others: repositories that bring their code along, and their model cards."""

from atlas_hf.sharing.model_card import model_card
from atlas_hf.sharing.remote_code import prepare_for_hub, save_for_hub

__all__ = ["model_card", "prepare_for_hub", "save_for_hub"]
