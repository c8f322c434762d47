//! Parameter files: the JSON of [`SamplingParamsBuilder`], with the tokens of the sequence so far.

use crate::input::bounded;
use crate::input::number::underflow;
use crate::input::similar::similar;
use crate::input::unique::Unique;
use crate::input::{LoadError, Problem};
use crate::output::line;
use flash_sampling::{History, SamplingParams, SamplingParamsBuilder};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The parameters of one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The parameters.
    pub params: SamplingParams,
    /// The sequence so far, if the file has one.
    pub history: Option<History>,
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

    /// A field with a value that `generate` takes by a flag instead, and this flag.
    fn field_with_flag(self, fields: &Map<String, Value>) -> Option<(&'static str, &'static str)> {
        let has_value = |field: &str| match fields.get(field) {
            None | Some(Value::Null) => false,
            Some(Value::Array(all)) => !all.is_empty(),
            Some(Value::String(text)) => !text.is_empty(),
            Some(_) => true,
        };
        let flags = [("max_tokens", "--max-tokens"), ("stop", "--stop")];
        flags.into_iter().find(|(field, _)| self == RequestKind::Sequence && has_value(field))
    }
}

/// Reads the parameters of `rows` rows.
///
/// # Errors
/// [`LoadError`], which names the file, the row and the field.
pub fn open(path: &Path, kind: RequestKind, rows: usize, vocab_size: u32) -> Result<Vec<Request>, LoadError> {
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
pub fn parse(text: &str, kind: RequestKind, rows: usize, vocab_size: u32) -> Result<Vec<Request>, Problem> {
    let invalid = |reason| Problem::Format { format: "parameter", reason };
    let broken = |error: serde_json::Error| invalid(error.to_string());
    let located = |row: &str, wrong: Wrong<'_>| invalid(format!("{row}{} ({})", wrong.reason, place(text, wrong.at)));
    serde_json::from_str::<Unique>(text).map_err(broken)?;
    let whole: &RawValue = serde_json::from_str(text).map_err(broken)?;
    if !whole.get().starts_with('[') {
        return Ok(vec![request(whole, kind, vocab_size).map_err(|wrong| located("", wrong))?; rows]);
    }
    let all: Vec<&RawValue> = serde_json::from_str(whole.get()).map_err(broken)?;
    if all.len() != rows {
        return Err(invalid(kind.wrong_length(all.len(), rows)));
    }
    let of_row = |(row, object)| {
        request(object, kind, vocab_size).map_err(|wrong| located(&format!("{} {row}: ", kind.name()), wrong))
    };
    all.into_iter().enumerate().map(of_row).collect()
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

fn request(object: &RawValue, kind: RequestKind, vocab_size: u32) -> Result<Request, Wrong<'_>> {
    let of_object = |reason: String| Wrong { reason, at: object };
    let Ok(parts) = serde_json::from_str::<BTreeMap<String, &RawValue>>(object.get()) else {
        return Err(of_object("it is not an object".into()));
    };
    let of_field = |field: &str, reason: String| Wrong { reason, at: parts.get(field).copied().unwrap_or(object) };
    let mut fields: Map<String, Value> =
        serde_json::from_str(object.get()).map_err(|error| of_object(error.to_string()))?;
    if let Some((field, flag)) = kind.field_with_flag(&fields) {
        return Err(of_field(field, format!("{field} is set by {flag}")));
    }
    for (field, value) in &parts {
        if let Some(number) = underflow(value.get()) {
            return Err(of_field(field, format!("{field}: {number} rounds to 0 as a float32")));
        }
    }
    let mut tokens = |field: &str| match fields.remove(field) {
        None | Some(Value::Null) => Ok(None),
        Some(list) => {
            let tokens = Vec::<u32>::deserialize(list).map(Some);
            tokens.map_err(|error| of_field(field, format!("{field}: {error}")))
        }
    };
    let (prompt, output) = (tokens("prompt_token_ids")?, tokens("output_token_ids")?);
    let history = (prompt.is_some() || output.is_some()).then(|| {
        let mut history = History::new(&prompt.unwrap_or_default());
        history.extend(output.unwrap_or_default());
        history
    });
    let read = |fields: Map<String, Value>| SamplingParamsBuilder::deserialize(Value::Object(fields));
    let whole = read(fields.clone()).map_err(|error| {
        // The error does not name the field, so each field is parsed alone.
        let alone = |(field, value): (String, Value)| {
            let error = read(Map::from_iter([(field.clone(), value)])).err()?.to_string();
            let suggestion = if error.starts_with("unknown field") { suggestion(&field) } else { None };
            Some(of_field(&field, suggestion.unwrap_or(error)))
        };
        fields.into_iter().find_map(alone).unwrap_or_else(|| of_object(error.to_string()))
    })?;
    let params = whole.build(vocab_size).map_err(|error| of_field(error.field, error.to_string()))?;
    Ok(Request { params, history })
}

/// The error of an unknown field with a similar known name.
fn suggestion(field: &str) -> Option<String> {
    let all = serde_json::to_value(SamplingParamsBuilder::default()).ok()?;
    let of_sequence = ["prompt_token_ids", "output_token_ids"];
    let meant = similar(field, all.as_object()?.keys().map(String::as_str).chain(of_sequence))?;
    Some(format!("unknown field `{}`; did you mean `{meant}`?", line::name(field)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_object_stands_for_every_row_and_an_array_for_one_each() {
        let same =
            parse(r#"{"top_k": 5, "prompt_token_ids": [1, 2], "output_token_ids": [3]}"#, RequestKind::Row, 3, 100)
                .unwrap();
        assert_eq!(same.len(), 3);
        assert_eq!(same[2].params.fields().top_k, 5);
        assert_eq!(same[2].history.as_ref().unwrap().tokens(), [1, 2, 3]);
        let each = parse(r#"[{"n": 1}, {"n": 2, "logit_bias": {"7": -1}}]"#, RequestKind::Row, 2, 100).unwrap();
        assert_eq!((each[1].params.fields().n, each[1].params.row(0, 0, None).logit_bias), (2, &[(7, -1.0)][..]));
        assert!(each[1].history.is_none());
    }

    #[test]
    fn errors_name_the_row_and_the_field() {
        for (text, says) in [
            ("", "EOF"),
            ("7", "it is not an object"),
            ("[{}]", "it has 1 object for 2 rows; one object without an array serves every row"),
            (r#"[{}, {"top_p": 0}]"#, "row 1: top_p is 0.0, but must be above 0 and at most 1"),
            (r#"[{}, {"n": 1, "n": 2}]"#, "duplicate field `n` at line 1 column"),
            (r#"{"logit_bias": {"1": 1, "1": 2}}"#, "duplicate field `1`"),
            (r#"{"prompt_token_ids": [1], "prompt_token_ids": [1]}"#, "duplicate field `prompt_token_ids`"),
            (r#"{"max_tokens": 7}"#, "max_tokens is no matter of the draw: only null is taken here"),
            (r#"[{}, {"seed": "one"}]"#, "row 1: seed: invalid type: string \"one\""),
            (r#"{"prompt_token_ids": ["a"]}"#, "prompt_token_ids: invalid type"),
            (r#"[{}, {"min_p": 1e-60}]"#, "row 1: min_p: 1e-60 rounds to 0 as a float32"),
            (
                r#"[{}, {"temperature": 1e-400}]"#,
                "row 1: temperature: 1e-400 rounds to 0 as a float32 (line 1 column 22)",
            ),
            (r#"{"logit_bias": {"x": 1}}"#, "invalid"),
            (r#"{"logit_bias": {"7": -1e-999}}"#, "logit_bias: -1e-999 rounds to 0"),
            (r#"[{}, {"stop_token_ids": [100]}]"#, "row 1: stop_token_ids names token 100, but there are 100 tokens"),
        ] {
            let error = parse(text, RequestKind::Row, 2, 100).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn errors_have_the_line_and_column() {
        let text = "[\n  {},\n  {\"top_k\": 5,\n   \"top_p\":  1.5}\n]";
        for (wrong, place) in [
            ("1.5", "(line 4 column 14)"),
            ("\"high\"", "(line 4 column 14)"),
            ("0.5, \"n\": 0", "(line 4 column 24)"),
            ("0.5, \"temprature\": 7", "(line 4 column 33)"),
            ("0.5, \"prompt_token_ids\": 7", "(line 4 column 39)"),
            ("0.5, \"prompt_token_ids\": [],\n\"stop_token_ids\": [1, 100]", "(line 5 column 19)"),
            ("0.5, \"max_tokens\": 7", "(line 4 column 33)"),
        ] {
            let error = parse(&text.replace("1.5", wrong), RequestKind::Row, 2, 100).unwrap_err().to_string();
            assert!(error.contains("row 1: ") && error.ends_with(place), "{wrong}: {error}");
        }
        // An error of two fields names one of them.
        let text = "  {\"temperature\": 0, \"kept\": true}";
        let error = parse(text, RequestKind::Row, 2, 100).unwrap_err().to_string();
        assert!(error.ends_with("kept is not defined for a greedy row (line 1 column 30)"), "{error}");
        let error = parse("[{},\n 7]", RequestKind::Row, 2, 100).unwrap_err().to_string();
        assert!(error.ends_with("row 1: it is not an object (line 2 column 2)"), "{error}");
        // Broken JSON has no rows yet.
        let error = parse("[{},\n {\"n\": }]", RequestKind::Row, 2, 100).unwrap_err().to_string();
        assert!(error.ends_with("line 2 column 8"), "{error}");
    }
}
