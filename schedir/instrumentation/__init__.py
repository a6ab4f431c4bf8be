"""Other people's trainers: what makes their steps visible here."""
