"""Data folders without a broker: verified, listed, built anew in the other layout."""
