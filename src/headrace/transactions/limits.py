"""What the operator's settings say about transactions."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.settings.values import BrokerSettings


@dataclass(frozen=True, slots=True)
class TransactionLimits:
    timeout_max_ms: int = 900_000
    """Longest timeout that a producer may ask for."""
    expiration_ms: int = 604_800_000
    """How long a transactional id is kept that nobody uses."""
    expiry_check_ms: int = 3_600_000
    open_max: int = 100_000
    """Open transactions on this broker."""
    ids_max: int = 5_000_000
    """Transactional ids on this broker."""
    two_phase: bool = True
    """Whether transactions without a timeout may be opened."""
    two_phase_expiration_ms: int = 3_600_000
    """As `expiration_ms`, of ids whose transactions are two-phase: such ids are often used once."""


def limits_from(settings: BrokerSettings) -> TransactionLimits:
    return TransactionLimits(
        settings["transaction.max.timeout.ms"],
        settings["transactional.id.expiration.ms"],
        settings["transaction.remove.expired.transaction.cleanup.interval.ms"],
        settings["transactions.open.max"],
        settings["transactional.ids.max"],
        settings["transaction.two.phase.commit.enable"],
        settings["transactional.id.two.phase.expiration.ms"],
    )
