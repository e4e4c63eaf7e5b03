"""Transactions: who coordinates them, their states, and how they end in every partition that they wrote to."""
