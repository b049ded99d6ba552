"""Other libraries' models trained by KSD; each file needs the library that it is named after."""
