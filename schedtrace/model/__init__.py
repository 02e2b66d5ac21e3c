"""The vocabulary: what a trace, a cause, a finding and a comparison are. Data only."""
