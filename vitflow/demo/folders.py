"""Where the bundled models of pictures and words lie, in folders that transformers loads without a network."""

from pathlib import Path

DEMO_CAPTION = Path(__file__).with_name("demo_caption")  # a LlavaForConditionalGeneration: it says what a picture shows
DEMO_TEXT = Path(__file__).with_name("demo_text")  # a SiglipModel: it says how well a sentence fits a picture
