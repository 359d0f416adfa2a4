"""The page as a Space on Hugging Face: a model for photographs, and the small one that vitflow ships."""

from vitflow.app import serve

if __name__ == "__main__":
    # A Space is public, and its proxy decides by which name it is reached: every name is allowed.
    public = {"host": "0.0.0.0", "port": 7860, "allowed_hosts": ["*"]}
    serve(["vit_small_patch16_224.augreg_in21k_ft_in1k", "demo"], **public).block_thread()
