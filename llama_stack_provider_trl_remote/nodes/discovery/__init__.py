"""Services, agents and Ollama hosts on the local network. What is found is a proposal: none of it is verified."""
