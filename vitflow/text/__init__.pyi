from .generating import explain_generation as explain_generation
from .generation import Generation as Generation
from .generation import WordSaliency as WordSaliency
from .image_tokens import ImageTokens as ImageTokens
from .reading import Reading as Reading
from .reading import explain_text as explain_text
from .words import Words as Words
