//! Parameter files: the JSON of [`SamplingParamsBuilder`], with the tokens of the sequence so far.

use crate::input::bounded;
use crate::input::number::{self, UNDERFLOW};
use crate::input::similar::similar;
use crate::input::{LoadError, Problem};
use crate::output::line;
use flash_sampling::{History, SamplingParams, SamplingParamsBuilder};
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

/// The parameters of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The parameters.
    pub params: SamplingParams,
    /// The sequence so far, if there is one.
    pub history: Option<History>,
}

/// One request for every row, or one for each row.
#[derive(Clone, Debug, PartialEq)]
pub struct Requests(Vec<Request>);

impl Requests {
    /// One request for every row.
    pub fn shared(request: Request) -> Self {
        Requests(vec![request])
    }

    /// The request of a row.
    pub fn of(&self, row: usize) -> &Request {
        self.0.get(row).unwrap_or(&self.0[0])
    }

    /// The different requests.
    pub fn iter(&self) -> impl Iterator<Item = &Request> {
        self.0.iter()
    }
}

/// The meaning of an object in a parameter file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// A row of `sample`.
    Row,
    /// A sequence of `generate`, which has flags for the end of its text.
    Sequence,
}

impl RequestKind {
    /// The noun in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            RequestKind::Row => "row",
            RequestKind::Sequence => "sequence",
        }
    }

    /// The error of an array of the wrong length.
    fn wrong_length(self, objects: usize, rows: usize) -> String {
        let flag = if self == RequestKind::Sequence { " (--num-sequences)" } else { "" };
        let (name, objects) = (self.name(), line::count(objects, "object"));
        let rows = line::count(rows, name);
        format!("it has {objects} for {rows}{flag}; one object without an array serves every {name}")
    }

    /// The error of a field with an invalid value, or of an unknown field.
    fn wrong_field(self, field: &str, error: &serde_json::Error) -> String {
        match (self, field) {
            (RequestKind::Sequence, "max_tokens") => "max_tokens is set by --max-tokens".into(),
            (RequestKind::Row, "max_tokens") => "max_tokens does not affect a draw; n is the number of draws".into(),
            (RequestKind::Sequence, "stop") => "stop is set by --stop".into(),
            _ => {
                let error = error.to_string();
                let is_unknown = error.starts_with("unknown field");
                is_unknown.then(|| suggestion(field)).flatten().unwrap_or(error)
            }
        }
    }
}

/// The error of an unknown field with a similar known name.
fn suggestion(field: &str) -> Option<String> {
    let all = serde_json::to_value(SamplingParamsBuilder::default()).ok()?;
    let of_sequence = ["prompt_token_ids", "output_token_ids"];
    let meant = similar(field, all.as_object()?.keys().map(String::as_str).chain(of_sequence))?;
    Some(format!("unknown field `{}`; did you mean `{meant}`?", line::name(field)))
}

/// Reads the parameters of `rows` rows.
///
/// # Errors
/// [`LoadError`], which names the file, the row and the field.
pub fn open(path: &Path, kind: RequestKind, rows: usize, vocab_size: u32) -> Result<Requests, LoadError> {
    let read = || {
        let bytes = bounded::read(path, bounded::PARAMETERS)?;
        let text = str::from_utf8(&bytes)
            .map_err(|_| Problem::Format { format: "parameter", reason: "it is not UTF-8".into() })?;
        parse(text, kind, rows, vocab_size)
    };
    read().map_err(|problem| problem.at(path))
}

/// Parses one object for every row, or an array with one object per row. An object has the fields of
/// [`SamplingParamsBuilder`], `prompt_token_ids` and `output_token_ids`.
///
/// # Errors
/// [`Problem::Format`], which names the row, the field, and the line and column of its value.
pub fn parse(text: &str, kind: RequestKind, rows: usize, vocab_size: u32) -> Result<Requests, Problem> {
    let invalid = |reason| Problem::Format { format: "parameter", reason };
    let broken = |error: serde_json::Error| invalid(error.to_string());
    let located = |row: &str, wrong: Wrong<'_>| invalid(format!("{row}{} ({})", wrong.reason, place(text, wrong.at)));
    let whole: &RawValue = serde_json::from_str(text).map_err(broken)?;
    if !whole.get().starts_with('[') {
        return Ok(Requests::shared(request(whole, kind, vocab_size).map_err(|wrong| located("", wrong))?));
    }
    let all: Vec<&RawValue> = serde_json::from_str(whole.get()).map_err(broken)?;
    if all.len() != rows {
        return Err(invalid(kind.wrong_length(all.len(), rows)));
    }
    let of_row = |(row, object)| {
        request(object, kind, vocab_size).map_err(|wrong| located(&format!("{} {row}: ", kind.name()), wrong))
    };
    all.into_iter().enumerate().map(of_row).collect::<Result<_, _>>().map(Requests)
}

/// An error of an object, and its place in the text.
struct Wrong<'t> {
    reason: String,
    at: &'t RawValue,
}

/// Line and column of a part of a text as serde_json counts: lines and their bytes from 1.
fn place(text: &str, part: &RawValue) -> String {
    let before = &text[..part.get().as_ptr() as usize - text.as_ptr() as usize];
    let line = before.rfind('\n').map_or(0, |end| end + 1);
    format!("line {} column {}", 1 + before.matches('\n').count(), 1 + before.len() - line)
}

/// The keys and values of an object. serde_json's maps drop values of duplicate keys.
struct Entries<'t>(Vec<(String, &'t RawValue)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Object)
    }
}

impl<'t> Entries<'t> {
    fn of(value: &'t RawValue) -> Option<Self> {
        serde_json::from_str(value.get()).ok()
    }

    /// A duplicate key with its second value.
    fn duplicate(&self) -> Option<Wrong<'t>> {
        let mut seen = BTreeSet::new();
        let (key, at) = self.0.iter().find(|(key, _)| !seen.insert(key))?;
        Some(Wrong { reason: format!("duplicate field `{}`", line::name(key)), at })
    }
}

/// What serde_json accepts, but changes: a duplicate key, or a number that is too small for a float64.
fn changed(value: &RawValue) -> Option<String> {
    match Entries::of(value) {
        Some(entries) => match entries.duplicate() {
            Some(wrong) => Some(wrong.reason),
            None => entries.0.iter().find_map(|(_, value)| changed(value)),
        },
        None => {
            (number::float(value.get()) == Err(UNDERFLOW)).then(|| format!("{} rounds to 0 as a float32", value.get()))
        }
    }
}

fn request(object: &RawValue, kind: RequestKind, vocab_size: u32) -> Result<Request, Wrong<'_>> {
    let Some(entries) = Entries::of(object) else {
        return Err(Wrong { reason: "it is not an object".into(), at: object });
    };
    if let Some(wrong) = entries.duplicate() {
        return Err(wrong);
    }
    let read = |fields: Map<String, Value>| SamplingParamsBuilder::deserialize(Value::Object(fields));
    let (mut prompt, mut output, mut fields) = (None, None, Map::new());
    for (field, at) in &entries.0 {
        let wrong = |reason: String| Wrong { reason, at };
        let of_field = |reason: &dyn fmt::Display| wrong(format!("{field}: {reason}"));
        // Also refuses a nesting that is too deep for `changed`.
        let value: Value = serde_json::from_str(at.get()).map_err(|error| of_field(&error))?;
        if let Some(reason) = changed(at) {
            return Err(of_field(&reason));
        }
        let tokens = |value| Option::<Vec<u32>>::deserialize(value).map_err(|error| of_field(&error));
        match field.as_str() {
            "prompt_token_ids" => prompt = tokens(value)?,
            "output_token_ids" => output = tokens(value)?,
            _ => {
                // Alone, since an error does not always name its field.
                let alone = read(Map::from_iter([(field.clone(), value.clone())]));
                alone.map_err(|error| wrong(kind.wrong_field(field, &error)))?;
                fields.insert(field.clone(), value);
            }
        }
    }
    let history = (prompt.is_some() || output.is_some()).then(|| {
        let mut history = History::new(&prompt.unwrap_or_default());
        history.extend(output.unwrap_or_default());
        history
    });
    let fields = read(fields).map_err(|error| Wrong { reason: error.to_string(), at: object })?;
    let params = fields.build(vocab_size).map_err(|error| {
        let at = entries.0.iter().find(|(field, _)| field == error.field).map_or(object, |(_, at)| at);
        Wrong { reason: error.to_string(), at }
    })?;
    Ok(Request { params, history })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_the_row_the_field_and_the_place() {
        for (text, says) in [
            ("", "EOF"),
            ("7", "it is not an object (line 1 column 1)"),
            ("[{},\n 7]", "row 1: it is not an object (line 2 column 2)"),
            // Broken JSON has no rows yet.
            ("[{},\n {\"n\": }]", "line 2 column 8"),
            ("[{}]", "it has 1 object for 2 rows; one object without an array serves every row"),
            (
                "[{},\n{\"n\": 1,\n\"top_p\": 0}]",
                "row 1: top_p is 0.0, but must be above 0 and at most 1 (line 3 column 10)",
            ),
            (r#"[{}, {"n": 1, "n": 2}]"#, "row 1: duplicate field `n` (line 1 column 20)"),
            (r#"{"logit_bias": {"1": 1, "1": 2}}"#, "logit_bias: duplicate field `1` (line 1 column 16)"),
            (r#"{"prompt_token_ids": [1], "prompt_token_ids": [1]}"#, "duplicate field `prompt_token_ids`"),
            (r#"{"max_tokens": 7}"#, "max_tokens does not affect a draw; n is the number of draws"),
            (r#"[{}, {"seed": "one"}]"#, "row 1: seed: invalid type: string \"one\""),
            (r#"{"prompt_token_ids": ["a"]}"#, "prompt_token_ids: invalid type"),
            (r#"[{}, {"prompt_token_ids": 7}]"#, "row 1: prompt_token_ids: invalid type"),
            (r#"[{}, {"min_p": 1e-60}]"#, "row 1: min_p: 1e-60 rounds to 0 as a float32"),
            (
                r#"[{}, {"temperature": 1e-400}]"#,
                "row 1: temperature: 1e-400 rounds to 0 as a float32 (line 1 column 22)",
            ),
            (r#"{"logit_bias": {"x": 1}}"#, "invalid"),
            (r#"{"logit_bias": {"7": -1e-999}}"#, "logit_bias: -1e-999 rounds to 0"),
            (
                r#"[{}, {"stop_token_ids": [100]}]"#,
                "row 1: stop_token_ids names token 100, but the vocabulary has size 100",
            ),
            (r#"[{}, {"top_k": 5, "temprature": 7}]"#, "did you mean `temperature`? (line 1 column 33)"),
            // An error of two fields names one of them.
            (r#"{"temperature": 0, "kept": true}"#, "kept is not defined for a greedy row (line 1 column 28)"),
        ] {
            let error = parse(text, RequestKind::Row, 2, 100).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
        let deep = |open: &str, close: &str| format!("{}1{}", open.repeat(200_000), close.repeat(200_000));
        for text in [deep("{\"seed\":", "}"), deep("[", "]"), format!("{{\"logit_bias\": {}}}", deep("{\"1\":", "}"))] {
            assert!(parse(&text, RequestKind::Row, 1, 100).is_err());
        }
    }
}
