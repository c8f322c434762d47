//! Files of row parameters: the JSON of [`SamplingParamsBuilder`], with the tokens of the sequence so far.

use crate::error::CommandError;
use crate::idle;
use crate::load::bounded;
use crate::load::similar::similar;
use crate::load::underflow::underflow;
use crate::load::unique::Unique;
use crate::load::{LoadError, Problem};
use crate::output::line;
use crate::sampler::beyond;
use flash_sampling::{History, Knobs, RowParams, SamplingParams, SamplingParamsBuilder};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What one row is drawn with.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The parameters.
    pub params: SamplingParams,
    /// The sequence so far, if any of it was given.
    pub history: Option<History>,
}

/// What an object of a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// A row of `sample`.
    Rows,
    /// A sequence of `generate`, which has flags for what ends its text.
    Sequences,
}

impl Of {
    fn one(self) -> &'static str {
        match self {
            Of::Rows => "row",
            Of::Sequences => "sequence",
        }
    }

    /// The refusal of an array of another length.
    fn miscounted(self, objects: usize, rows: usize) -> String {
        let flag = if self == Of::Sequences { " (--num-sequences)" } else { "" };
        let (one, objects) = (self.one(), line::count(objects, "object"));
        let rows = line::count(rows, one);
        format!("it has {objects} for {rows}{flag}; one object without an array serves every {one}")
    }

    /// The flag that a field is given by in its place, where the field asks for something.
    fn flag_instead(self, fields: &Map<String, Value>) -> Option<(&'static str, &'static str)> {
        let asks = |field: &str| match fields.get(field) {
            None | Some(Value::Null) => false,
            Some(Value::Array(all)) => !all.is_empty(),
            Some(Value::String(text)) => !text.is_empty(),
            Some(_) => true,
        };
        let flags = [("max_tokens", "--max-tokens"), ("stop", "--stop")];
        flags.into_iter().find(|(field, _)| self == Of::Sequences && asks(field))
    }
}

/// Reads the parameters of `rows` rows, for a vocabulary.
///
/// # Errors
/// What is wrong with the file, and with which of its rows.
pub fn open(path: &Path, of: Of, rows: usize, vocab_size: u32) -> Result<Vec<Request>, LoadError> {
    let read = || {
        let bytes = bounded::read(path, bounded::PARAMETERS)?;
        let text = str::from_utf8(&bytes)
            .map_err(|_| Problem::Format { format: "parameter", reason: "it is not UTF-8".into() })?;
        parse(text, of, rows, vocab_size)
    };
    read().map_err(|problem| problem.at(path))
}

/// Checks that a seed of the flags, if there is one, is some object's.
///
/// # Errors
/// Bad usage, where every object has a seed of its own.
pub fn needs_seed(requests: &[Request], flag: Option<&str>) -> Result<(), CommandError> {
    match flag {
        Some(flag) if requests.iter().all(|request| request.params.fields().seed.is_some()) => {
            Err(CommandError::usage(format!("{flag} means nothing: every object of --params has a seed")))
        }
        _ => Ok(()),
    }
}

/// Warns of what changes nothing in the rows of a file, once for each field: a request may rightly carry it. Of a row that
/// is refused for what the sampler `lacks` that is told.
pub fn tell_idle<'a>(path: &Path, of: Of, lacks: Knobs, rows: impl IntoIterator<Item = RowParams<'a>>) {
    let mut told = BTreeSet::new();
    let taken = |row: &RowParams<'_>| row.enabled().intersection(lacks).is_empty();
    for (at, row) in rows.into_iter().enumerate().filter(|(_, row)| taken(row)) {
        for idle in idle::knobs(&row).into_iter().filter(|idle| told.insert(idle.field)) {
            tracing::warn!("{}: {} {at}: {}", path.display(), of.one(), idle.told(str::to_owned));
        }
    }
}

/// Warns of tokens of a sequence beyond the vocabulary, once for each list. Not refused: places of images or sound have such
/// numbers.
pub fn tell_beyond(path: &Path, requests: &[Request], vocab_size: u32) {
    let mut told = BTreeSet::new();
    for (at, history) in requests.iter().enumerate().filter_map(|(at, request)| Some((at, request.history.as_ref()?))) {
        for (field, tokens) in [("prompt_token_ids", history.prompt()), ("output_token_ids", history.output())] {
            if let Some(&token) = tokens.iter().find(|&&token| token >= vocab_size)
                && told.insert(field)
            {
                let names = beyond(field, token, vocab_size);
                tracing::warn!("{}: row {at}: {names}: no penalty is of it", path.display());
            }
        }
    }
}

/// Parses one object, which stands for every row, or an array with one object a row. An object has the fields of
/// [`SamplingParamsBuilder`], and `prompt_token_ids` and `output_token_ids` where penalties need them.
///
/// # Errors
/// [`Problem::Format`], which names the row, the field, and where in the text its value begins.
pub fn parse(text: &str, of: Of, rows: usize, vocab_size: u32) -> Result<Vec<Request>, Problem> {
    let invalid = |reason| Problem::Format { format: "parameter", reason };
    let broken = |error: serde_json::Error| invalid(error.to_string());
    let located = |row: &str, wrong: Wrong<'_>| invalid(format!("{row}{} ({})", wrong.reason, place(text, wrong.at)));
    serde_json::from_str::<Unique>(text).map_err(broken)?;
    let whole: &RawValue = serde_json::from_str(text).map_err(broken)?;
    if !whole.get().starts_with('[') {
        return Ok(vec![request(whole, of, vocab_size).map_err(|wrong| located("", wrong))?; rows]);
    }
    let all: Vec<&RawValue> = serde_json::from_str(whole.get()).map_err(broken)?;
    if all.len() != rows {
        return Err(invalid(of.miscounted(all.len(), rows)));
    }
    let of_row = |(row, object)| {
        request(object, of, vocab_size).map_err(|wrong| located(&format!("{} {row}: ", of.one()), wrong))
    };
    all.into_iter().enumerate().map(of_row).collect()
}

/// What is wrong with an object, and the part of the text that it is wrong with.
struct Wrong<'t> {
    reason: String,
    at: &'t RawValue,
}

/// Where a part of a text begins, as serde_json counts: lines and their bytes from 1.
fn place(text: &str, part: &RawValue) -> String {
    let before = &text[..part.get().as_ptr() as usize - text.as_ptr() as usize];
    let line = before.rfind('\n').map_or(0, |end| end + 1);
    format!("line {} column {}", 1 + before.matches('\n').count(), 1 + before.len() - line)
}

fn request(object: &RawValue, of: Of, vocab_size: u32) -> Result<Request, Wrong<'_>> {
    let of_object = |reason: String| Wrong { reason, at: object };
    let Ok(parts) = serde_json::from_str::<BTreeMap<String, &RawValue>>(object.get()) else {
        return Err(of_object("it is no object".into()));
    };
    let of_field = |field: &str, reason: String| Wrong { reason, at: parts.get(field).copied().unwrap_or(object) };
    let mut fields: Map<String, Value> =
        serde_json::from_str(object.get()).map_err(|error| of_object(error.to_string()))?;
    if let Some((field, flag)) = of.flag_instead(&fields) {
        return Err(of_field(field, format!("{field} is given by {flag}")));
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
        // The field alone has the same error; which one has it, the error does not tell.
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

/// The refusal of an unknown field that is nearly a known one.
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
            parse(r#"{"top_k": 5, "prompt_token_ids": [1, 2], "output_token_ids": [3]}"#, Of::Rows, 3, 100).unwrap();
        assert_eq!(same.len(), 3);
        assert_eq!(same[2].params.fields().top_k, 5);
        assert_eq!(same[2].history.as_ref().unwrap().tokens(), [1, 2, 3]);
        let each = parse(r#"[{"n": 1}, {"n": 2, "logit_bias": {"7": -1}}]"#, Of::Rows, 2, 100).unwrap();
        assert_eq!((each[1].params.fields().n, each[1].params.row(0, 0, None).logit_bias), (2, &[(7, -1.0)][..]));
        assert!(each[1].history.is_none());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, says) in [
            ("", "EOF"),
            ("7", "it is no object"),
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
            let error = parse(text, Of::Rows, 2, 100).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn where_it_is_wrong_is_told() {
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
            let error = parse(&text.replace("1.5", wrong), Of::Rows, 2, 100).unwrap_err().to_string();
            assert!(error.contains("row 1: ") && error.ends_with(place), "{wrong}: {error}");
        }
        // What makes two fields impossible together names one of them; a row that is no object is the row's place.
        let text = "  {\"temperature\": 0, \"kept\": true}";
        let error = parse(text, Of::Rows, 2, 100).unwrap_err().to_string();
        assert!(error.ends_with("kept is not defined for a greedy row (line 1 column 30)"), "{error}");
        let error = parse("[{},\n 7]", Of::Rows, 2, 100).unwrap_err().to_string();
        assert!(error.ends_with("row 1: it is no object (line 2 column 2)"), "{error}");
        // Broken JSON has no rows yet.
        let error = parse("[{},\n {\"n\": }]", Of::Rows, 2, 100).unwrap_err().to_string();
        assert!(error.ends_with("line 2 column 8"), "{error}");
    }
}
