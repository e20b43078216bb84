"""Drives the lab with OpenAI's own client. Usage: client.py BASE_URL CASES.json

CASES.json is [{"request": {...}, "right": [{"name", "arguments"}]}]: requests and the tool calls that
answer them.
"""

import json
import sys

import openai

base_url, cases_file = sys.argv[1:]
cases = json.load(open(cases_file))
client = openai.OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0)
# The model knows what to answer to this, so the reply has more than a character.
hello = [
    {"role": "system", "content": "The code of locker duva is by4pa."},
    {"role": "user", "content": "What is the code of locker duva? Answer with the code alone."},
]


def check(condition, *what):
    if not condition:
        raise SystemExit(f"client.py: {what}")


# Models.
models = client.models.list().data
check([m.owned_by for m in models] == ["culprit-lab"], models)
model = models[0].id
check(client.models.retrieve(model).id == model)

# Chat, whole and streamed, with logprobs.
asked = dict(model=model, messages=hello, temperature=0, max_completion_tokens=12, logprobs=True, top_logprobs=3)
whole = client.chat.completions.create(**asked)
choice = whole.choices[0]
check(whole.usage.completion_tokens == len(choice.logprobs.content), whole)
check(whole.usage.prompt_tokens_details.cached_tokens >= 0, whole)
check(all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob == t.logprob for t in choice.logprobs.content), choice)
text, logprobs, finish, usage = "", [], None, None
with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
    for chunk in stream:
        usage = chunk.usage or usage
        for c in chunk.choices:
            text += c.delta.content or ""
            logprobs += c.logprobs.content if c.logprobs else []
            finish = c.finish_reason or finish
check(text == choice.message.content, text, choice)
check([t.logprob for t in logprobs] == [t.logprob for t in choice.logprobs.content])
check(finish == choice.finish_reason and usage.total_tokens == whole.usage.total_tokens, finish, usage)

# Seeds and stop strings.
draws = {client.chat.completions.create(model=model, messages=hello, seed=7, max_tokens=16).choices[0].message.content for _ in range(3)}
check(len(draws) == 1, draws)
stopped = client.chat.completions.create(model=model, messages=hello, temperature=0, max_tokens=12, stop=[choice.message.content[1:3]])
check(stopped.choices[0].finish_reason == "stop" and stopped.choices[0].message.content == choice.message.content[:1], stopped)

# An object under a schema, which the prompt asks for too.
schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"], "additionalProperties": False}
question = hello[1]["content"].split(" Answer")[0] + ' Answer with a JSON object and nothing else: {"code":"CODE"}'
message = client.chat.completions.create(
    model=model, messages=[hello[0], {"role": "user", "content": question}], temperature=0, max_tokens=32,
    response_format={"type": "json_schema", "json_schema": {"name": "code", "strict": True, "schema": schema}},
).choices[0].message
check(json.loads(message.content) == {"code": "by4pa"}, message)

# Completions.
asked = dict(model=model, prompt="hello", temperature=0, max_tokens=8, logprobs=2)
whole = client.completions.create(**asked)
check(len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens, whole)
text = "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True))
check(text == whole.choices[0].text, text, whole)

# Tools, whole and streamed.
for case in cases:
    request = dict(case["request"], model=model)
    message = client.chat.completions.create(**request).choices[0].message
    calls = [{"name": c.function.name, "arguments": c.function.arguments} for c in message.tool_calls or []]
    content, streamed = "", {}
    for chunk in client.chat.completions.create(**request, stream=True):
        for c in chunk.choices:
            content += c.delta.content or ""
            for t in c.delta.tool_calls or []:
                have = streamed.setdefault(t.index, {"id": t.id, "name": t.function.name, "arguments": ""})
                have["arguments"] += t.function.arguments or ""
    check(content == (message.content or ""), content, message)
    check([{"name": c["name"], "arguments": c["arguments"]} for c in streamed.values()] == calls, streamed, calls)
    check(all(c["id"] for c in streamed.values()), streamed)
    same = [(c["name"], json.loads(c["arguments"])) for c in calls] == [(c["name"], json.loads(c["arguments"])) for c in case["right"]]
    check(same, calls, case["right"])

# Errors.
for kind, status, code, request in [
    (openai.BadRequestError, 400, None, dict(messages=[{"role": "wizard", "content": "x"}])),
    (openai.BadRequestError, 400, "unsupported_parameter", dict(messages=hello, n=2)),
    (openai.BadRequestError, 400, "context_length_exceeded", dict(messages=hello, max_tokens=100_000)),
    (openai.NotFoundError, 404, "model_not_found", dict(messages=hello, model="gpt-9")),
]:
    try:
        client.chat.completions.create(**{"model": model, **request})
    except openai.APIStatusError as e:
        check(isinstance(e, kind) and e.status_code == status and e.code == code and e.type == "invalid_request_error", e)
    else:
        check(False, "no error", request)

print(f"openai {openai.__version__}: models, chat, streams, logprobs, seeds, stops, completions, {len(cases)} tool requests, errors")
