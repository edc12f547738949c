{{- define "octavo.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "octavo.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "octavo.labels" -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "octavo.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.platform) }}
{{- end }}

{{/* The Secret with the file of keys; empty without keys. */}}
{{- define "octavo.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret }}{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.entries }}{{ include "octavo.name" . }}-api-keys
{{- end }}
{{- end }}

{{/* The claim of the cache; empty where it is an emptyDir. */}}
{{- define "octavo.cacheClaim" -}}
{{- if .Values.cache.existingClaim }}{{ .Values.cache.existingClaim }}
{{- else if .Values.cache.create }}{{ include "octavo.name" . }}-cache
{{- end }}
{{- end }}
