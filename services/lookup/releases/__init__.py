"""The served releases: finding, opening, warming and swapping their stores."""
