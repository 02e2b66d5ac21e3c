"""What if: recorded or made-up loads replayed under other configurations."""
